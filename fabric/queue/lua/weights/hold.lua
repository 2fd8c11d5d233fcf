-- hold(holder, ttl_ms, row, address, count_max)
-- A receiver says what it holds, for a time; with no time it holds nothing. What is over is deleted with it.
-- Beyond count_max those whose time ends first are forgotten.
-- keys weights.addresses weights.clock weights.holders weights.holding
-- flags allow-oom
-- use look time
local holder, now = ARGV[1], now_ms(weights.clock, true)
local function forget(ids)
  if #ids == 0 then return end
  redis.call('HDEL', weights.holders, unpack(ids))
  redis.call('HDEL', weights.addresses, unpack(ids))
  redis.call('ZREM', weights.holding, unpack(ids))
end
redis.call('HSET', weights.holders, holder, ARGV[3])
if ARGV[4] == '' then
  redis.call('HDEL', weights.addresses, holder)
else
  redis.call('HSET', weights.addresses, holder, ARGV[4])
end
redis.call('ZADD', weights.holding, now + tonumber(ARGV[2]), holder)
forget(redis.call('ZRANGEBYSCORE', weights.holding, '-inf', now, 'LIMIT', 0, 1000))
local excess = redis.call('ZCARD', weights.holding) - tonumber(ARGV[5])
if excess > 0 then forget(redis.call('ZRANGE', weights.holding, 0, math.min(excess, 1000) - 1)) end
