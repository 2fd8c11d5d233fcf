-- push_group(group_id, size, quorum, priority, deadline_ms | 0, task, dead_count_max, then per trajectory: id, job)
-- Take a group and all its trajectories in, once. At the broker's memory limit it is refused whole.
--   KEYS[1] run hash       depth, bytes and their bounds      (both grow)
--   KEYS[2..4] ready streams   KEYS[5] bell   KEYS[6] open hash   KEYS[7] job hash   KEYS[8] record hash
--   KEYS[9] counters       KEYS[10] group hash (created)      KEYS[11] late zset    KEYS[12] clock
--   KEYS[13] consumed zset groups already acknowledged  (read: a repeated push stays without effect)
--   KEYS[14] dead hash     (read: who lets dead letters pile up is stopped here)
-- Returns {1} taken · {0} known already · {-1, depth, depth_max, size} · {-2} no such run ·
-- {-3, dead_count, dead_count_max} · {-4, bytes, bytes_max, weight}; below 0 nothing is written
-- use batch count record look time ring
local group_id, size, task = ARGV[1], tonumber(ARGV[2]), ARGV[6]
if redis.call('EXISTS', KEYS[10]) == 1 or redis.call('ZSCORE', KEYS[13], group_id) then
  tally(KEYS[1], 'depth', 0)  -- a write, for the WAIT that may follow to wait for
  return {0}
end

local limits = redis.call('HMGET', KEYS[1], 'depth', 'depth_max', 'bytes', 'bytes_max')
if not limits[2] then return {-2} end
local depth, depth_max = whole(limits[1], 0), whole(limits[2], 0)
local bytes, bytes_max = whole(limits[3], 0), whole(limits[4], 0)
local dead_count = redis.call('HLEN', KEYS[14])
if depth + size > depth_max then return {-1, depth, depth_max, size} end
if dead_count >= tonumber(ARGV[7]) then return {-3, dead_count, tonumber(ARGV[7])} end

local ids, jobs, records, weight = {}, {}, {}, #task
for i = 8, #ARGV, 2 do
  ids[#ids + 1], records[ARGV[i]] = ARGV[i], new_record(0)
  add_pair(jobs, ARGV[i], ARGV[i + 1])
  weight = weight + #ARGV[i + 1]
end
if bytes + weight > bytes_max then return {-4, bytes, bytes_max, weight} end

tally(KEYS[1], 'depth', size)
tally(KEYS[1], 'bytes', weight)
redis.call('HSET', KEYS[10], 'size', size, 'quorum', ARGV[3], 'priority', ARGV[4], 'completed', 0, 'failed', 0,
  'cancelled', 0, 'state', 'open', 'bytes', weight, 'task', task)
redis.call('HSET', KEYS[6], group_id, ARGV[4] .. ' ' .. ARGV[3] .. ' ' .. ARGV[3])
if ARGV[5] ~= '0' then
  local deadline = now_ms(KEYS[12]) + tonumber(ARGV[5])
  redis.call('ZADD', KEYS[11], deadline, group_id)
  redis.call('HSET', KEYS[10], 'deadline', deadline)
end
call_in_parts('HSET', KEYS[7], jobs)
write_records(KEYS[8], ids, records)
make_ready({KEYS[2], KEYS[3], KEYS[4]}, KEYS[5], KEYS[6], ids, false)
tally(KEYS[9], 'groups_submitted', 1)
tally(KEYS[9], 'trajectories_submitted', size)
return {1}
