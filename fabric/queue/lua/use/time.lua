-- Look at a shard's clock and set it, so that it goes on from here; also return the machine's time. Needs look.lua
-- before it.
local function now_ms(clock)
  local wall, now = look(clock)
  redis.call('SET', clock, string.format('%d %d', wall, now))
  return now, wall
end
