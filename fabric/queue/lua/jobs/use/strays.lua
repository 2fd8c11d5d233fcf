-- Turns of other homes, for whoever comes once they have waited long enough. Rules and bounds: rules/queue/placement.py.
-- Needs homed.lua.
-- keys shard.turn_homed_at
local LOOK_COUNT, PATIENCE_MS_MAX, GRACE_MS = 16, 5000, 1000

-- Whether anybody may take the turn that has waited longest, before all others.
local function is_overdue(member, now)
  local age = now - tonumber(string.match(member, ' (%d+) %d+ %S+$') or 0)
  return age < 0 or age >= GRACE_MS
end

-- Take turns of other homes that waited `grace` longer than to read their context here would take.
-- Returns in how many ms the next of those looked at may be taken; -1: there is none.
local function take_strays(us_per_token, grace, count, now, shift, ids, since)
  local taken, next_ms = {}, -1
  for _, member in ipairs(redis.call('ZRANGE', shard.turn_homed_at, 0, LOOK_COUNT - 1)) do
    local time, tokens, id = string.match(member, ' (%d+) (%d+) (%S+)$')
    local patience = math.min(PATIENCE_MS_MAX, tonumber(tokens or 0) * us_per_token / 1000) + grace
    local age = now - tonumber(time or 0)
    local left = age < 0 and 0 or patience - age -- of later than now: somebody else wrote it
    if left > 0 then
      next_ms = math.ceil(next_ms < 0 and left or math.min(next_ms, left))
    elseif #taken < count then
      taken[#taken + 1] = member
      if id then ids[#ids + 1], since[id] = id, string.format('%d-0', tonumber(time) + shift) end
    end
  end
  forget_homed(taken)
  return next_ms
end
