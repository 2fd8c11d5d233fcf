-- Turns that wait for the worker that made the turn before: its prefix cache may hold their context (their home). Of a run on
-- unlike hardware those without one wait here too, for a worker that suits them, under the name SUITED, which no worker has.
-- Rules and bounds: rules/queue/placement.py. Both sets hold the members "home class since tokens id". Needs batch.lua.
-- keys shard.turn_homed shard.turn_homed_at
local SUITED = '~'

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

-- The turns that wait for this worker, by class, the oldest first; what is none is dropped here.
local function find_home(worker, count)
  if count <= 0 then return {} end
  local first, last, found, bad = '[' .. worker .. ' 1 ', '(' .. worker .. ' 4', {}, {}
  for _, member in ipairs(redis.call('ZRANGEBYLEX', shard.turn_homed, first, last, 'LIMIT', 0, count)) do
    local class, time, id = string.match(member, ' (%d) (%d+) %d+ (%S+)$')
    if id then found[#found + 1] = {class = tonumber(class), time = tonumber(time), id = id, member = member} end
    if not id then bad[#bad + 1] = member end
  end
  forget_homed(bad)
  return found
end

-- Take those of a class. since: by id, as an entry of a ready stream is called; shift: what the machine's clock is ahead of
-- this one.
local function take_home(own, class, count, shift, ids, since)
  local taken = {}
  while #taken < count and own[1] and own[1].class <= class do
    local each = table.remove(own, 1)
    taken[#taken + 1] = each.member
    ids[#ids + 1], since[each.id] = each.id, string.format('%d-0', each.time + shift)
  end
  forget_homed(taken)
end
