-- heartbeat(worker, info, with_assignment)
-- A worker says that it lives; the answer says what it should serve.
--   KEYS[1] workers hash   KEYS[2] heartbeats zset   KEYS[3] assignments hash
-- Returns {now_ms, assignment | false}
-- use time
local now = now_ms()
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now, ARGV[1])
return {now, redis.call('HGET', KEYS[3], ARGV[1])}
