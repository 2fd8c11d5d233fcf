-- late_groups(limit)
-- Names of groups whose deadline has passed.
-- keys shard.clock shard.late
-- flags allow-oom
-- use look time
return redis.call('ZRANGEBYSCORE', shard.late, '-inf', now_ms(shard.clock), 'LIMIT', 0, ARGV[1])
