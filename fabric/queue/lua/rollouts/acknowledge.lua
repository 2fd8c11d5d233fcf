-- acknowledge(entry_id, consumer, group_id, consumed_count_max, kept_bytes_max, kept_count_max)
-- The trainer has used a group.
-- Returns 1 acknowledged · 2 acknowledged, and more is kept than may be: drop some · 0 it was acknowledged before, or
-- cancelled (nothing else is written) · -1 another consumer holds it by now, or it is run again (nothing written)
-- keys shard.clock shard.completed shard.consumed shard.counters shard.kept shard.run group.kept_rollouts group.kept_row
-- keys group.rollouts group.row trajectory.job trajectory.record
-- flags allow-oom
-- use batch count look time holder leave
local g = redis.call('HMGET', group.row, 'size', 'bytes', 'state')
if not g[1] then
  redis.call('XACK', shard.completed, 'trainer', ARGV[1])
  redis.call('XDEL', shard.completed, ARGV[1])
  return 0
end
if g[3] ~= 'complete' or not may_end(ARGV[1], ARGV[2]) then return -1 end
return leave(ARGV[1], ARGV[3], g, tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]))
