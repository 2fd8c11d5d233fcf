-- acknowledge(entry_id, group_id, consumed_count_max)
-- The trainer has used a group: forget it, and remember its name so that a repeated push stays without effect.
--   KEYS[1] completed stream   KEYS[2] group hash   KEYS[3] rollouts hash   KEYS[4] trajectory record hash
--   KEYS[5] run hash (depth)   KEYS[6] counters     KEYS[7] consumed zset
-- Returns 1 acknowledged · 0 it was before, or cancelled (nothing else is written)
-- use batch record time
redis.call('XACK', KEYS[1], 'trainer', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local size = redis.call('HGET', KEYS[2], 'size')
if not size then return 0 end
local ids = {}
for index = 0, tonumber(size) - 1 do ids[index + 1] = ARGV[2] .. '.' .. index end
call_in_parts('HDEL', KEYS[4], ids)
redis.call('DEL', KEYS[2], KEYS[3])
redis.call('HINCRBY', KEYS[5], 'depth', -tonumber(size))
redis.call('HINCRBY', KEYS[6], 'groups_consumed', 1)
redis.call('ZADD', KEYS[7], now_ms(), ARGV[2])
redis.call('ZREMRANGEBYRANK', KEYS[7], 0, -tonumber(ARGV[3]) - 1)
return 1
