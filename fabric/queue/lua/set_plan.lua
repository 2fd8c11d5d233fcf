-- set_plan(term, plan)
-- Keep the newest capacity plan for people to read; not for a leader that was replaced.
--   KEYS[1] plan string   KEYS[2] lease_epoch: the highest term
-- Returns 1 done · 0 a newer term has begun (nothing written)
-- flags allow-oom
-- use count term
if read_term(KEYS[2]) > tonumber(ARGV[1]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2])
return 1
