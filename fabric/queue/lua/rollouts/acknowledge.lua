-- acknowledge(entry_id, consumer, group_id, consumed_count_max, kept_bytes_max, kept_count_max)
-- The trainer has used a group: keep it for people to look at, or forget it; remember its name, so that a repeated push
-- stays without effect.
-- Returns 1 acknowledged · 2 acknowledged, and more is kept than may be: drop some · 0 it was acknowledged before, or
-- cancelled (nothing else is written) · -1 another consumer holds it by now, or it is run again (nothing written)
-- keys shard.clock shard.completed shard.consumed shard.counters shard.kept shard.run group.kept_rollouts group.kept_row
-- keys group.rollouts group.row trajectory.job trajectory.record
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
local bytes, kept_max, answer = math.max(0, whole(g[2], 0)), tonumber(ARGV[5]), 1
if bytes <= kept_max and redis.call('EXISTS', group.rollouts) == 1 then
  redis.call('RENAME', group.row, group.kept_row)
  redis.call('RENAME', group.rollouts, group.kept_rollouts)
  local entry = redis.call('XADD', shard.kept, '*', 'group', ARGV[3], 'bytes', bytes)
  redis.call('HSET', group.kept_row, 'ended', string.match(entry, '^%d+'))
  local is_over = tally(shard.run, 'kept_bytes', bytes) > kept_max or redis.call('XLEN', shard.kept) > tonumber(ARGV[6])
  if is_over then answer = 2 end
else
  redis.call('DEL', group.row, group.rollouts)
end
tally(shard.run, 'depth', -size)
tally(shard.run, 'bytes', -whole(g[2], 0))
tally(shard.counters, 'groups_consumed', 1)
redis.call('ZADD', shard.consumed, now_ms(shard.clock), ARGV[3])
redis.call('ZREMRANGEBYRANK', shard.consumed, 0, -tonumber(ARGV[4]) - 1)
return answer
