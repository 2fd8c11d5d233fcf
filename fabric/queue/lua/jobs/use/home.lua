-- Whether a turn goes to its home: that has a lease, and no weights came since `version`, which took its cache away.
-- Needs count.lua, look.lua, ring.lua and homed.lua before it.
-- A home with a place left is woken; otherwise somebody who is idle is, and learns when he may take it.
-- keys shard.clock shard.leases shard.open shard.run turn.bell turn.held
local function is_sent_home(id, home, version, bell, tokens, bell_ttl_ms)
  if home == '-' or whole(redis.call('HGET', shard.run, 'head_version'), -1) > tonumber(version) then return false end
  local lease = redis.call('HGET', shard.leases, home)
  local slots, until_ms = string.match(lease or '', '^%d+ (%d+) (%d+)$')
  local _, now = look(shard.clock)
  if not slots or slots == '0' or (until_ms ~= '0' and tonumber(until_ms) <= now) then return false end
  wait_at_home(home, urgency(redis.call('HGET', shard.open, group_of(id)), false) + 1, now, tokens, id)
  if whole(redis.call('HGET', turn.held, home), 0) >= tonumber(slots) then
    if redis.call('LPUSH', turn.bell, '1') > 64 then redis.call('LTRIM', turn.bell, 0, 63) end
  elseif redis.call('LPUSH', bell, '1') > 1 then
    redis.call('LTRIM', bell, 0, 0)
  end
  redis.call('PEXPIRE', bell, bell_ttl_ms)
  return true
end
