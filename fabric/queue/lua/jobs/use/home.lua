-- Where a turn is put that goes to its home: that has a lease, and so have others, and no weights came since `version`,
-- which took its cache away; or, where hardware is unlike (turn_hardware is there), that waits for what suits it.
-- A home with less than its share is woken; otherwise somebody who is idle is, and learns when he may take it.
-- Needs count.lua, look.lua, ring.lua, share.lua and homed.lua before it.
-- keys shard.begun shard.clock shard.lease_slots shard.leases shard.open shard.run shard.turn_hardware turn.bell turn.held

-- Wake all idle workers: each knows which turns suit it.
local function ring_all()
  for _ = 1, math.min(64, redis.call('HLEN', shard.leases)) do redis.call('LPUSH', turn.bell, '1') end
  redis.call('LTRIM', turn.bell, 0, 63)
end

-- What holds for all turns of one call, read once: the head, the time, the slots of all leases, and of each home its own.
local all

local function home_of(home)
  if not all then
    local _, now = look(shard.clock)
    all = {head = whole(redis.call('HGET', shard.run, 'head_version'), -1), now = now, slots = slots_of_all(), homes = {},
      is_unlike = redis.call('EXISTS', shard.turn_hardware) == 1}
  end
  local found = all.homes[home]
  if not found then
    local _, slots = lease_of(home, all.now)
    found = {slots = slots or 0}
    all.homes[home] = found
  end
  return found
end

local function has_its_share(home, found)
  if found.is_full == nil then
    found.is_full = whole(redis.call('HGET', turn.held, home), 0) >= share_of(found.slots)
  end
  return found.is_full
end

-- Returns SUITED: it waits for what suits it · true: it waits for its home · false: it does neither.
local function is_sent_home(id, home, version, bell, tokens, bell_ttl_ms)
  local found = home_of(home)
  local has_home = home ~= '-' and all.head <= tonumber(version) and found.slots > 0
  if not has_home and not all.is_unlike or all.slots <= found.slots then return false end
  local class = urgency(redis.call('HGET', shard.open, group_of(id)), false, turn.ready) + 1
  wait_at_home(has_home and home or SUITED, class, all.now, tokens, id)
  if not has_home then
    tally(shard.turn_hardware, '\ttokens', tonumber(tokens))
    tally(shard.turn_hardware, '\tcount', 1)
    return SUITED
  elseif has_its_share(home, found) then
    if redis.call('LPUSH', turn.bell, '1') > 64 then redis.call('LTRIM', turn.bell, 0, 63) end
  elseif redis.call('LPUSH', bell, '1') > 1 then
    redis.call('LTRIM', bell, 0, 0)
  end
  redis.call('PEXPIRE', bell, bell_ttl_ms)
  return true
end
