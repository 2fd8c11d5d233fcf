-- heartbeat(worker, info)
-- A worker says that it lives; the answer is the run that it should serve.
--   KEYS[1] workers hash   KEYS[2] heartbeats zset   KEYS[3] assignments hash   KEYS[4] clock
-- flags allow-oom
-- use look time
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('ZADD', KEYS[2], now_ms(KEYS[4]), ARGV[1])
return redis.call('HGET', KEYS[3], ARGV[1])
