-- cancel_group(group_id, consumed_count_max)
-- Drop a group that nobody wants any more; its workers learn it at their next renewal and free their slots. Its name is
-- remembered, so that a push that is repeated does not bring it back.
--   KEYS[1..19] see queue/lua/use/drop.lua      the completed stream keeps its entry; it is skipped when read
--   KEYS[20] consumed zset   KEYS[21] clock
-- Returns 1 cancelled · 0 no such group (never pushed, consumed, or cancelled before)
-- flags allow-oom
-- use batch count record hold look time forget_turns drop
local g = redis.call('HMGET', KEYS[13], 'size', 'bytes')
if not g[1] then return 0 end
local size, ids = math.min(whole(g[1], 0), GROUP_SIZE_MAX), {}
drop_unfinished(ARGV[1], size)
for index = 0, size - 1 do ids[index + 1] = ARGV[1] .. '.' .. index end
call_in_parts('HDEL', KEYS[1], ids)
call_in_parts('HDEL', KEYS[4], ids)
tally(KEYS[17], 'bytes', -whole(redis.call('HGET', KEYS[13], 'bytes'), 0))
redis.call('DEL', KEYS[13], KEYS[14])
redis.call('HDEL', KEYS[18], ARGV[1])
redis.call('ZREM', KEYS[19], ARGV[1])
tally(KEYS[17], 'depth', -size)
tally(KEYS[16], 'groups_cancelled', 1)
redis.call('ZADD', KEYS[20], now_ms(KEYS[21]), ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[20], 0, -tonumber(ARGV[2]) - 1)
return 1
