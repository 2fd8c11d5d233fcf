-- swap_group(entry_id, consumer, group_id, consumed_count_max, kept_bytes_max, kept_count_max, next_id, task,
--   dead_count_max, task_name | '', nearest_first 0 | 1, then per trajectory: id, job)
-- The trainer drops a group, and another task runs in its place: in as many trajectories, with the dropped one's quorum
-- and priority, and its deadline from now. Both or neither, so nobody else can take the place, and no death in between
-- loses a task or runs two. At the broker's memory limit it goes on: a group leaves for the one that comes.
-- Returns {code, what runs in its place}: '=' this task · '' none · else the task of another process, or of an earlier
-- call. code: 1 swapped · 2 swapped, and more is kept than may be: drop some · 0 it was acknowledged before, or
-- cancelled (nothing else is written) · -1 another consumer holds it by now, or it is run again (nothing written)
-- Or {-3, dead_count, dead_count_max} · {-4, bytes, bytes_max, weight}, the task alone is too large: nothing is written
-- keys shard.clock shard.completed shard.consumed shard.counters shard.dead shard.kept shard.late shard.lengths shard.open
-- keys shard.run group.kept_rollouts group.kept_row group.rollouts group.row trajectory.bell trajectory.job
-- keys trajectory.ready trajectory.record next_row
-- flags allow-oom
-- use batch count record look time ring length holder leave first enter
local next_id, task, at = ARGV[7], ARGV[8], 12
local g = redis.call('HMGET', group.row, 'size', 'bytes', 'state', 'quorum', 'priority', 'pushed', 'deadline')
local there = redis.call('HGET', next_row, 'task') or (redis.call('ZSCORE', shard.consumed, next_id) and task) or ''
if there == task then there = '=' end
if not g[1] then
  redis.call('XACK', shard.completed, 'trainer', ARGV[1])
  redis.call('XDEL', shard.completed, ARGV[1])
  if there ~= '' then tally(shard.run, 'depth', 0) end  -- a write, for the WAIT that may follow to wait for
  return {0, there}
end
if g[3] ~= 'complete' or not may_end(ARGV[1], ARGV[2]) then return {-1, there} end
if there == '' then
  local dead_count, weight = redis.call('HLEN', shard.dead), weight_of(task, at)
  local limits = redis.call('HMGET', shard.run, 'bytes', 'bytes_max')
  if dead_count >= tonumber(ARGV[9]) then return {-3, dead_count, tonumber(ARGV[9])} end
  if weight > whole(limits[2], 0) then return {-4, whole(limits[1], 0), whole(limits[2], 0), weight} end
end
local code = leave(ARGV[1], ARGV[3], g, tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]))
if there ~= '' then return {code, there} end
local size, pushed = (#ARGV - at + 1) / 2, whole(g[6], 0)
local like = {quorum = math.min(size, math.max(1, whole(g[4], size))), priority = whole(g[5], 1),
  deadline_ms = math.max(0, whole(g[7], pushed) - pushed)}
enter(next_row, next_id, task, like, (is_long(ARGV[10]) and 1 or 0) + (ARGV[11] == '1' and 0 or 2), at)
return {code, '='}
