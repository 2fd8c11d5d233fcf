-- acknowledge(entry_id, consumer, group_id, consumed_count_max)
-- The trainer has used a group: forget it, and remember its name so that a repeated push stays without effect.
--   KEYS[1] completed stream   KEYS[2] group hash   KEYS[3] rollouts hash   KEYS[4] trajectory record hash
--   KEYS[5] run hash (depth, bytes)   KEYS[6] counters   KEYS[7] consumed zset   KEYS[8] trajectory job hash   KEYS[9] clock
-- Returns 1 acknowledged · 0 it was before, or cancelled (nothing else is written) ·
-- -1 another consumer holds it by now, or it is run again (nothing written)
-- flags allow-oom
-- use batch count look time holder
local g = redis.call('HMGET', KEYS[2], 'size', 'bytes', 'state')
if not g[1] then
  redis.call('XACK', KEYS[1], 'trainer', ARGV[1])
  redis.call('XDEL', KEYS[1], ARGV[1])
  return 0
end
if g[3] ~= 'complete' or not may_end(KEYS[1], ARGV[1], ARGV[2]) then return -1 end
redis.call('XACK', KEYS[1], 'trainer', ARGV[1])
redis.call('XDEL', KEYS[1], ARGV[1])
local size, ids = math.min(whole(g[1], 0), 10000), {} -- GROUP_SIZE_MAX of contract/limits.py
for index = 0, size - 1 do ids[index + 1] = ARGV[3] .. '.' .. index end
call_in_parts('HDEL', KEYS[4], ids)
call_in_parts('HDEL', KEYS[8], ids)
redis.call('DEL', KEYS[2], KEYS[3])
tally(KEYS[5], 'depth', -size)
tally(KEYS[5], 'bytes', -whole(g[2], 0))
tally(KEYS[6], 'groups_consumed', 1)
redis.call('ZADD', KEYS[7], now_ms(KEYS[9]), ARGV[3])
redis.call('ZREMRANGEBYRANK', KEYS[7], 0, -tonumber(ARGV[4]) - 1)
return 1
