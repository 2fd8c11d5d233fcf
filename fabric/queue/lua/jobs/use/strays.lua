-- Turns of other homes, for whoever comes once they have waited long enough. Rules and bounds: rules/queue/placement.py.
-- Needs count.lua, share.lua and homed.lua.
-- keys shard.turn_hardware shard.turn_homed_at
local LOOK_COUNT, PATIENCE_MS_MAX, GRACE_MS = 16, 5000, 1000

-- Whether anybody may take the turn that has waited longest, before all others.
local function is_overdue(member, now)
  local age = now - tonumber(string.match(member, ' (%d+) %d+ %S+$') or 0)
  return age < 0 or age >= GRACE_MS
end

-- Return what reading costs more on this worker than on others, ms a token in all of its slots, and the tokens of a usual
-- context: so long a turn without a home is left to others, for each token beyond these. 0: as much, or nobody knows.
local function unsuited(worker, hardware, now)
  local us, tokens, count = unpack(redis.call('HMGET', shard.turn_hardware, hardware, '\ttokens', '\tcount'))
  local _, slots = lease_of(worker, now)
  return (slots or 0) * (tonumber(us or 0) or 0) / 1000, whole(tokens, 0) / math.max(1, whole(count, 0))
end

-- Take turns of other homes that waited `grace` longer than to read their context here would take; and those without one
-- that waited longer than what they cost more here. taker: the worker, its us for a token that it reads, and its kind.
-- Returns in how many ms the next of those looked at may be taken; -1: there is none.
local function take_strays(taker, grace, count, now, shift, ids, since)
  local taken, next_ms, ms, usual = {}, -1, nil, nil
  for _, member in ipairs(redis.call('ZRANGE', shard.turn_homed_at, 0, LOOK_COUNT - 1)) do
    local time, tokens, id = string.match(member, ' (%d+) (%d+) (%S+)$')
    local waits_ms = tonumber(tokens or 0) * tonumber(taker[2]) / 1000
    if string.sub(member, 1, 2) == SUITED .. ' ' then
      if not ms then ms, usual = unsuited(taker[1], taker[3], now) end
      waits_ms = math.max(0, ms * (tonumber(tokens or 0) - usual))
    end
    local patience = math.min(PATIENCE_MS_MAX, waits_ms) + grace
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
