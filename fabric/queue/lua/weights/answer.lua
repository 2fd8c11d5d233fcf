-- answer(member, data, ttl_ms, count_max)
-- Answer in a round, which is forgotten ttl_ms after its last answer.
-- Returns 1 answered · 0 count_max others have
-- keys answers
-- flags allow-oom
if redis.call('HEXISTS', answers, ARGV[1]) == 0 and redis.call('HLEN', answers) >= tonumber(ARGV[4]) then return 0 end
redis.call('HSET', answers, ARGV[1], ARGV[2])
redis.call('PEXPIRE', answers, ARGV[3])
return 1
