-- assign(worker, run | '', bell_ttl_ms)
-- Say which run's leases a worker should look at ('': as before), and wake it.
--   KEYS[1] assignments hash   KEYS[2] lease bell list of this worker, bounded to one ring
-- flags allow-oom
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
redis.call('LPUSH', KEYS[2], '1')
redis.call('LTRIM', KEYS[2], 0, 0)
redis.call('PEXPIRE', KEYS[2], ARGV[3])
return 1
