-- Look at a shard's clock and set it, so that it goes on from here; also return the machine's time. Needs look.lua
-- before it.
-- may_begin: make a clock where there is none. Others would leave one behind for a run that was deleted just now.
local function now_ms(clock, may_begin)
  local wall, now = look(clock)
  local text = string.format('%d %d', wall, now)
  if may_begin then redis.call('SET', clock, text) else redis.call('SET', clock, text, 'XX') end
  return now, wall
end
