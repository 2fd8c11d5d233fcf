-- answer(member, data, ttl_ms, count_max)
-- Answer in a round, which is forgotten ttl_ms after its last answer.
--   KEYS[1] answers hash   member → data
-- Returns 1 answered · 0 count_max others have
-- flags allow-oom
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 and redis.call('HLEN', KEYS[1]) >= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
