-- add_sample(term, sample, sample_count_max)
-- Keep a sample of how all goes, for people who look later; not of a leader that was replaced.
-- Returns 1 done · 0 a newer term has begun (nothing written)
-- keys fabric.lease_epoch fabric.samples
-- flags allow-oom
-- use count term
if read_term(fabric.lease_epoch) > tonumber(ARGV[1]) then return 0 end
redis.call('XADD', fabric.samples, 'MAXLEN', '~', ARGV[3], '*', 'sample', ARGV[2])
return 1
