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

-- Returns SUITED: it waits for what suits it · true: it waits for its home · false: it does neither.
local function is_sent_home(id, home, version, bell, tokens, bell_ttl_ms)
  local is_known = home ~= '-' and whole(redis.call('HGET', shard.run, 'head_version'), -1) <= tonumber(version)
  local is_unlike = redis.call('EXISTS', shard.turn_hardware) == 1
  if not is_known and not is_unlike then return false end
  local _, now = look(shard.clock)
  local _, slots = lease_of(home, now)
  local has_home = is_known and slots and slots > 0
  if not has_home and not is_unlike or slots_of_all() <= (slots or 0) then return false end
  local class = urgency(redis.call('HGET', shard.open, group_of(id)), false, turn.ready) + 1
  wait_at_home(has_home and home or SUITED, class, now, tokens, id)
  if not has_home then
    tally(shard.turn_hardware, '\ttokens', tonumber(tokens))
    tally(shard.turn_hardware, '\tcount', 1)
    return SUITED
  elseif whole(redis.call('HGET', turn.held, home), 0) >= share_of(slots) then
    if redis.call('LPUSH', turn.bell, '1') > 64 then redis.call('LTRIM', turn.bell, 0, 63) end
  elseif redis.call('LPUSH', bell, '1') > 1 then
    redis.call('LTRIM', bell, 0, 0)
  end
  redis.call('PEXPIRE', bell, bell_ttl_ms)
  return true
end
