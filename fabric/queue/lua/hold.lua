-- hold(holder, ttl_ms, row, address, count_max)
-- A receiver says what it holds, for a time; with no time it holds nothing. What is over is deleted with it.
--   KEYS[1] holders hash   holder → row   KEYS[2] holding zset   holder → until when   KEYS[3] clock
--   KEYS[4] addresses hash   holder → where it serves, of those that do
-- Beyond count_max those whose time ends first are forgotten.
-- flags allow-oom
-- use look time
local holder, now = ARGV[1], now_ms(KEYS[3])
local function forget(ids)
  if #ids == 0 then return end
  redis.call('HDEL', KEYS[1], unpack(ids))
  redis.call('HDEL', KEYS[4], unpack(ids))
  redis.call('ZREM', KEYS[2], unpack(ids))
end
redis.call('HSET', KEYS[1], holder, ARGV[3])
if ARGV[4] == '' then
  redis.call('HDEL', KEYS[4], holder)
else
  redis.call('HSET', KEYS[4], holder, ARGV[4])
end
redis.call('ZADD', KEYS[2], now + tonumber(ARGV[2]), holder)
forget(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 1000))
local excess = redis.call('ZCARD', KEYS[2]) - tonumber(ARGV[5])
if excess > 0 then forget(redis.call('ZRANGE', KEYS[2], 0, math.min(excess, 1000) - 1)) end
