-- assign(term, worker, runs | '', bell_ttl_ms)
-- Say which runs' leases a worker should look at ('': as before), and wake it; not for a leader that was replaced.
-- Returns 1 done · 0 a newer term has begun (nothing written)
-- keys fabric.assignments fabric.lease_epoch bell
-- flags allow-oom
-- use count term
if read_term(fabric.lease_epoch) > tonumber(ARGV[1]) then return 0 end
if ARGV[3] ~= '' then redis.call('HSET', fabric.assignments, ARGV[2], ARGV[3]) end
redis.call('LPUSH', bell, '1')
redis.call('LTRIM', bell, 0, 0)
redis.call('PEXPIRE', bell, ARGV[4])
return 1
