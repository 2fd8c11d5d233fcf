-- set_head(version, weights, epoch)
-- Tell a shard of the run which version is the head, what its weights are, and which publisher made it so; neither goes
-- back. What a run's workers hold of an older publisher may be of other weights: see claim.lua.
-- Returns 1 set · 0 it is that far already
-- keys shard.run
-- flags allow-oom
-- use count
local facts = redis.call('HMGET', shard.run, 'head_version', 'moved_by')
local known, version = whole(facts[1], -1), tonumber(ARGV[1])
local moved_by, epoch = whole(facts[2], 0), tonumber(ARGV[3])
if known >= 0 and (epoch < moved_by or (epoch == moved_by and known >= version)) then return 0 end
redis.call('HSET', shard.run, 'moved_by', epoch)
if version >= known then redis.call('HSET', shard.run, 'head_version', version, 'weights', ARGV[2]) end
return 1
