-- cancel_group(group_id, consumed_count_max, first_fence | '', pinned | '')
-- Drop a group that nobody wants any more; its workers learn it at their next renewal and free their slots. Its name is
-- remembered, so that a push that is repeated does not bring it back.
-- Returns 1 cancelled · 0 no such group (never pushed, consumed, or cancelled before) · -1 the run is gone, or was made
-- again under its name, and has another first_fence · -2 another version is pinned than the caller evaluates
-- keys shard.clock shard.consumed shard.counters shard.late shard.open shard.run group.rollouts group.row
-- keys trajectory.job trajectory.record
-- flags allow-oom
-- use batch parts count record claims look time forget_turns drop whose
local other = whose(ARGV[3], ARGV[4])
if other then return other == 'of another run' and -1 or -2 end
local g = redis.call('HMGET', group.row, 'size', 'bytes')
if not g[1] then return 0 end
local size, ids = math.min(whole(g[1], 0), GROUP_SIZE_MAX), {}
drop_unfinished(ARGV[1], size)
for index = 0, size - 1 do ids[index + 1] = ARGV[1] .. '.' .. index end
call_in_parts('HDEL', trajectory.record, ids)
call_in_parts('HDEL', trajectory.job, ids)
tally(shard.run, 'bytes', -whole(redis.call('HGET', group.row, 'bytes'), 0))
redis.call('DEL', group.row, group.rollouts)
redis.call('HDEL', shard.open, ARGV[1])
redis.call('ZREM', shard.late, ARGV[1])
tally(shard.run, 'depth', -size)
tally(shard.counters, 'groups_cancelled', 1)
redis.call('ZADD', shard.consumed, now_ms(shard.clock), ARGV[1])
redis.call('ZREMRANGEBYRANK', shard.consumed, 0, -tonumber(ARGV[2]) - 1)
return 1
