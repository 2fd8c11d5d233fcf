-- assign(term, worker, run | '', bell_ttl_ms)
-- Say which run's leases a worker should look at ('': as before), and wake it; not for a leader that was replaced.
--   KEYS[1] assignments hash   KEYS[2] lease bell list of this worker, bounded to one ring
--   KEYS[3] lease_epoch: the highest term
-- Returns 1 done · 0 a newer term has begun (nothing written)
-- flags allow-oom
-- use count term
if read_term(KEYS[3]) > tonumber(ARGV[1]) then return 0 end
if ARGV[3] ~= '' then redis.call('HSET', KEYS[1], ARGV[2], ARGV[3]) end
redis.call('LPUSH', KEYS[2], '1')
redis.call('LTRIM', KEYS[2], 0, 0)
redis.call('PEXPIRE', KEYS[2], ARGV[4])
return 1
