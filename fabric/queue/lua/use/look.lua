-- A shard's clock, in integer milliseconds: the broker's, without its steps. A claim must neither end early nor last
-- for ever because somebody set the machine's time, so it goes forward by what passed since it was last set, at most
-- STEP_MS_MAX. An outage of the broker costs no claim either.      clock string "wall now"
local STEP_MS_MAX = 1000

-- What the machine's clock and this one show, and what passed beyond that since somebody set it last.
local function look(clock)
  local time = redis.call('TIME')
  local wall = time[1] * 1000 + math.floor(time[2] / 1000)
  local saved = redis.call('GET', clock)
  if not saved then return wall, wall, 0 end
  local last_wall, last = string.match(saved, '^(%d+) (%d+)$')
  if not last or #saved > 31 then return wall, wall, 0 end -- somebody wrote there what is no clock
  local passed = math.max(0, wall - tonumber(last_wall))
  local counted = math.min(STEP_MS_MAX, passed)
  return wall, tonumber(last) + counted, passed - counted
end
