-- Whether a turn goes to its home: that has a lease, and so have others, and no weights came since `version`, which took
-- its cache away. Where hardware is unlike (the run has read_costs), one without a home waits for what suits it, and all
-- workers are woken. Needs count.lua, look.lua, ring.lua, share.lua and homed.lua before it.
-- A home with less than its share is woken; otherwise somebody who is idle is, and learns when he may take it.
-- keys shard.begun shard.clock shard.lease_slots shard.leases shard.open shard.run turn.bell turn.held
local function ring_all()
  for _ = 1, math.min(64, redis.call('HLEN', shard.leases)) do redis.call('LPUSH', turn.bell, '1') end
  redis.call('LTRIM', turn.bell, 0, 63)
end

local function is_sent_home(id, home, version, bell, tokens, bell_ttl_ms)
  local head, read_costs = unpack(redis.call('HMGET', shard.run, 'head_version', 'read_costs'))
  local is_known = home ~= '-' and whole(head, -1) <= tonumber(version)
  if not is_known and not read_costs then return false end
  local _, now = look(shard.clock)
  local _, slots = lease_of(home, now)
  local has_home = is_known and slots and slots > 0
  if not has_home and not read_costs or slots_of_all() <= (slots or 0) then return false end
  local class = urgency(redis.call('HGET', shard.open, group_of(id)), false, turn.ready) + 1
  wait_at_home(has_home and home or SUITED, class, now, tokens, id)
  if not has_home then
    redis.call('HINCRBY', shard.run, 'first_tokens', tokens)
    redis.call('HINCRBY', shard.run, 'first_count', 1)
    ring_all()
    return true
  elseif whole(redis.call('HGET', turn.held, home), 0) >= share_of(slots) then
    if redis.call('LPUSH', turn.bell, '1') > 64 then redis.call('LTRIM', turn.bell, 0, 63) end
  elseif redis.call('LPUSH', bell, '1') > 1 then
    redis.call('LTRIM', bell, 0, 0)
  end
  redis.call('PEXPIRE', bell, bell_ttl_ms)
  return true
end
