-- acknowledge(entry_id, consumer, group_id, consumed_count_max)
-- The trainer has used a group: forget it, and remember its name so that a repeated push stays without effect.
-- Returns 1 acknowledged · 0 it was before, or cancelled (nothing else is written) ·
-- -1 another consumer holds it by now, or it is run again (nothing written)
-- keys shard.clock shard.completed shard.consumed shard.counters shard.run group.rollouts group.row trajectory.job
-- keys trajectory.record
-- flags allow-oom
-- use batch count look time holder
local g = redis.call('HMGET', group.row, 'size', 'bytes', 'state')
if not g[1] then
  redis.call('XACK', shard.completed, 'trainer', ARGV[1])
  redis.call('XDEL', shard.completed, ARGV[1])
  return 0
end
if g[3] ~= 'complete' or not may_end(ARGV[1], ARGV[2]) then return -1 end
redis.call('XACK', shard.completed, 'trainer', ARGV[1])
redis.call('XDEL', shard.completed, ARGV[1])
local size, ids = math.min(whole(g[1], 0), 10000), {} -- GROUP_SIZE_MAX of contract/limits.py
for index = 0, size - 1 do ids[index + 1] = ARGV[3] .. '.' .. index end
call_in_parts('HDEL', trajectory.record, ids)
call_in_parts('HDEL', trajectory.job, ids)
redis.call('DEL', group.row, group.rollouts)
tally(shard.run, 'depth', -size)
tally(shard.run, 'bytes', -whole(g[2], 0))
tally(shard.counters, 'groups_consumed', 1)
redis.call('ZADD', shard.consumed, now_ms(shard.clock), ARGV[3])
redis.call('ZREMRANGEBYRANK', shard.consumed, 0, -tonumber(ARGV[4]) - 1)
return 1
