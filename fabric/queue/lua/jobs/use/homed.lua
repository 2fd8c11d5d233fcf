-- Turns that wait for the worker that made the turn before: its prefix cache may hold their context (their home).
-- Rules and bounds: rules/queue/placement.py. Both sets hold the members "home class since tokens id". Needs batch.lua.
-- keys shard.turn_homed shard.turn_homed_at
local LOOK_COUNT, PATIENCE_MS_MAX, GRACE_MS = 16, 5000, 1000

local function forget_homed(members)
  call_in_parts('ZREM', shard.turn_homed, members)
  call_in_parts('ZREM', shard.turn_homed_at, members)
end

-- Let a turn wait for its home, which may have a place for it or not.
local function wait_at_home(home, class, now, tokens, id)
  local member = string.format('%s %d %d %d %s', home, class, now, tokens, id)
  redis.call('ZADD', shard.turn_homed, 0, member)
  redis.call('ZADD', shard.turn_homed_at, now, member)
end

-- Take turns of a class that wait for this worker, the oldest first. since: by id, as an entry of a ready stream is
-- called; shift: what the machine's clock is ahead of this one.
local function take_home(worker, class, count, shift, ids, since)
  if count <= 0 then return end
  local first = worker .. ' ' .. class .. ' '
  local found = redis.call('ZRANGEBYLEX', shard.turn_homed, '[' .. first, '(' .. first .. '~', 'LIMIT', 0, count)
  for _, member in ipairs(found) do
    local time, id = string.match(member, ' (%d+) %d+ (%S+)$')
    if id then ids[#ids + 1], since[id] = id, string.format('%d-0', tonumber(time) + shift) end
  end
  forget_homed(found)
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
