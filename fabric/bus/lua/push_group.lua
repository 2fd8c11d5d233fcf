-- push_group(group_id, size, task, dead_count_max, then per trajectory: id, job)
-- Take a group and all its trajectories in, once.
--   KEYS[1] run hash       depth, depth_max             (depth grows by size)
--   KEYS[2] ready stream   KEYS[3] job hash   KEYS[4] record hash   KEYS[5] bell    of trajectories
--   KEYS[6] counters       KEYS[7] group hash           (created)
--   KEYS[8] consumed zset  groups already acknowledged  (read: a repeated push stays without effect)
--   KEYS[9] dead hash      (read: who lets dead letters pile up is stopped here)
-- Returns {1} taken · {0} known already · {-1, depth, depth_max} full, nothing written · {-2} no such run ·
-- {-3, count, dead_count_max} too many dead letters, nothing written
-- use batch record ring
local group_id, size, task = ARGV[1], tonumber(ARGV[2]), ARGV[3]
if redis.call('EXISTS', KEYS[7]) == 1 or redis.call('ZSCORE', KEYS[8], group_id) then return {0} end

local limits = redis.call('HMGET', KEYS[1], 'depth', 'depth_max')
if not limits[2] then return {-2} end
local depth, depth_max = tonumber(limits[1] or 0), tonumber(limits[2])
if depth + size > depth_max then return {-1, depth, depth_max} end
local dead_count = redis.call('HLEN', KEYS[9])
if dead_count >= tonumber(ARGV[4]) then return {-3, dead_count, tonumber(ARGV[4])} end

redis.call('HINCRBY', KEYS[1], 'depth', size)
redis.call('HSET', KEYS[7], 'size', size, 'closed', 0, 'failed', 0, 'state', 'open', 'task', task)
local ids, jobs, records = {}, {}, {}
for i = 5, #ARGV, 2 do
  ids[#ids + 1], records[ARGV[i]] = ARGV[i], new_record()
  add_pair(jobs, ARGV[i], ARGV[i + 1])
end
call_in_parts('HSET', KEYS[3], jobs)
write_records(KEYS[4], ids, records)
make_ready(KEYS[2], KEYS[5], ids)
redis.call('HINCRBY', KEYS[6], 'groups_submitted', 1)
redis.call('HINCRBY', KEYS[6], 'trajectories_submitted', size)
return {1}
