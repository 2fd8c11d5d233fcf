-- set_head(version, weights)
-- Tell a shard of the run which version is the head, and what its weights are; it never goes back.
-- Returns 1 set · 0 it is that far already
-- keys shard.run
-- flags allow-oom
-- use count
local known = whole(redis.call('HGET', shard.run, 'head_version'), -1)
if known >= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', shard.run, 'head_version', ARGV[1], 'weights', ARGV[2])
return 1
