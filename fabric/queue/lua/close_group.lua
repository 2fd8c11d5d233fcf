-- close_group(group_id)
-- Complete a group at its deadline with what it has; what has not ended is cancelled.
--   KEYS[1..19] see queue/lua/use/drop.lua
-- Returns 1 complete · 0 it was before, or is gone
-- flags allow-oom
-- use batch count record hold forget_turns drop close
if redis.call('HGET', KEYS[13], 'state') ~= 'open' then
  redis.call('ZREM', KEYS[19], ARGV[1])
  return 0
end
complete(ARGV[1], 'deadline')
return 1
