-- Whether a turn goes to its home: that has a lease, and so have others, and no weights came since `version`, which took
-- its cache away. Needs count.lua, look.lua, ring.lua, share.lua and homed.lua before it.
-- A home with less than its share is woken; otherwise somebody who is idle is, and learns when he may take it.
-- keys shard.begun shard.clock shard.lease_slots shard.leases shard.open shard.run turn.bell turn.held
local function is_sent_home(id, home, version, bell, tokens, bell_ttl_ms)
  if home == '-' or whole(redis.call('HGET', shard.run, 'head_version'), -1) > tonumber(version) then return false end
  local _, now = look(shard.clock)
  local _, slots = lease_of(home, now)
  if not slots or slots == 0 or slots_of_all() <= slots then return false end
  wait_at_home(home, urgency(redis.call('HGET', shard.open, group_of(id)), false, turn.ready) + 1, now, tokens, id)
  if whole(redis.call('HGET', turn.held, home), 0) >= share_of(slots) then
    if redis.call('LPUSH', turn.bell, '1') > 64 then redis.call('LTRIM', turn.bell, 0, 63) end
  elseif redis.call('LPUSH', bell, '1') > 1 then
    redis.call('LTRIM', bell, 0, 0)
  end
  redis.call('PEXPIRE', bell, bell_ttl_ms)
  return true
end
