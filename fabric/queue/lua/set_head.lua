-- set_head(version)
-- Tell a shard of the run which version is the head; it never goes back.
--   KEYS[1] run hash   head_version   (read by claim)
-- Returns 1 set · 0 it is that far already
-- flags allow-oom
-- use count
local known = whole(redis.call('HGET', KEYS[1], 'head_version'), -1)
if known >= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'head_version', ARGV[1])
return 1
