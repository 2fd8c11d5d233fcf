-- set_plan(term, plan)
-- Keep the newest capacity plan for people to read; not for a leader that was replaced.
-- Returns 1 done · 0 a newer term has begun (nothing written)
-- keys fabric.lease_epoch fabric.plan
-- flags allow-oom
-- use count term
if read_term(fabric.lease_epoch) > tonumber(ARGV[1]) then return 0 end
redis.call('SET', fabric.plan, ARGV[2])
return 1
