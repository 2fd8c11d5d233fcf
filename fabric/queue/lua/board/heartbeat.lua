-- heartbeat(worker, info)
-- A worker says that it lives; the answer is the runs that it should serve.
-- keys fabric.assignments fabric.clock fabric.heartbeats fabric.workers
-- flags allow-oom
-- use look time
redis.call('HSET', fabric.workers, ARGV[1], ARGV[2])
redis.call('ZADD', fabric.heartbeats, now_ms(fabric.clock, true), ARGV[1])
return redis.call('HGET', fabric.assignments, ARGV[1])
