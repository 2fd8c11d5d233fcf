-- acknowledge(entry_id, group_id, consumed_count_max)
-- The trainer has used a group: forget it, and remember its name so that a repeated push stays without effect.
--   KEYS[1] completed stream   KEYS[2] group hash   KEYS[3] rollouts hash   KEYS[4] trajectory record hash
--   KEYS[5] run hash (depth, bytes)   KEYS[6] counters   KEYS[7] consumed zset   KEYS[8] trajectory job hash   KEYS[9] clock
-- Returns 1 acknowledged · 0 it was before, or cancelled (nothing else is written)
-- flags allow-oom
-- use batch look time
redis.call('XACK', KEYS[1], 'trainer', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local g = redis.call('HMGET', KEYS[2], 'size', 'bytes')
if not g[1] then return 0 end
local size, ids = tonumber(g[1]), {}
for index = 0, size - 1 do ids[index + 1] = ARGV[2] .. '.' .. index end
call_in_parts('HDEL', KEYS[4], ids)
call_in_parts('HDEL', KEYS[8], ids)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HINCRBY', KEYS[5], 'depth', -size)
redis.call('HINCRBY', KEYS[5], 'bytes', -tonumber(g[2]))
redis.call('HINCRBY', KEYS[6], 'groups_consumed', 1)
redis.call('ZADD', KEYS[7], now_ms(KEYS[9]), ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[7], 0, -tonumber(ARGV[3]) - 1)
return 1
