-- push_group(group_id, size, quorum, priority, deadline_ms | 0, task, dead_count_max, task_name | '',
--   nearest_first 0 | 1, first_fence | '', pinned | '', then per trajectory: id, job)
-- Take a group and all its trajectories in, once. At the broker's memory limit it is refused whole.
-- first_fence: of the run that the caller knows; one that was made again under its name has another. pinned: the version
-- that the caller evaluates.
-- Returns {1} taken · {0, its task, its size, each '' where that is no other} known already · {-1, depth, depth_max, size} ·
-- {-2} no such run · {-3, dead_count, dead_count_max} · {-4, bytes, bytes_max, weight} · {-5} another version is pinned;
-- below 0 nothing is written
-- keys shard.clock shard.consumed shard.counters shard.dead shard.late shard.lengths shard.open shard.run group.row
-- keys trajectory.bell trajectory.job trajectory.ready trajectory.record
-- use batch count record look time ring length first enter whose
local group_id, size, task = ARGV[1], tonumber(ARGV[2]), ARGV[6]
local other = whose(ARGV[10], ARGV[11])
if other then return {other == 'of another run' and -2 or -5} end
if redis.call('EXISTS', group.row) == 1 or redis.call('ZSCORE', shard.consumed, group_id) then
  tally(shard.run, 'depth', 0)  -- a write, for the WAIT that may follow to wait for
  local known = redis.call('HMGET', group.row, 'task', 'size')
  local known_size = whole(known[2], size)
  return {0, known[1] ~= task and known[1] or '', known_size ~= size and known_size or ''}
end

local limits = redis.call('HMGET', shard.run, 'depth', 'depth_max', 'bytes', 'bytes_max')
if not limits[2] then return {-2} end
local depth, depth_max = whole(limits[1], 0), whole(limits[2], 0)
local bytes, bytes_max, weight = whole(limits[3], 0), whole(limits[4], 0), weight_of(task, 12)
local dead_count = redis.call('HLEN', shard.dead)
if depth + size > depth_max then return {-1, depth, depth_max, size} end
if dead_count >= tonumber(ARGV[7]) then return {-3, dead_count, tonumber(ARGV[7])} end
if bytes + weight > bytes_max then return {-4, bytes, bytes_max, weight} end

local like = {quorum = ARGV[3], priority = ARGV[4], deadline_ms = tonumber(ARGV[5])}
enter(group.row, group_id, task, like, (is_long(ARGV[8]) and 1 or 0) + (ARGV[9] == '1' and 0 or 2), 12)
return {1}
