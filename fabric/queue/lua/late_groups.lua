-- late_groups(limit)
-- Names of groups whose deadline has passed.      KEYS[1] late zset   KEYS[2] clock
-- flags allow-oom
-- use look time
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', now_ms(KEYS[2]), 'LIMIT', 0, ARGV[1])
