-- pin(version)
-- Say which version a run evaluates from now on: whose.lua asks for it.
-- keys shard.run
-- flags allow-oom
return redis.call('HSET', shard.run, 'pinned', ARGV[1])
