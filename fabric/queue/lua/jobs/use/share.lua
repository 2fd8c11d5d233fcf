-- Valid leases, and what a worker takes under one while others have room: rules/queue/placement.py. Needs count.lua.
-- keys shard.begun shard.lease_slots shard.leases
local SHARE_SLACK, READY_MS = 1.125, 50

-- Return the epoch and slots of a worker's lease; nil: it has none that is valid.
local function lease_of(worker, now)
  local lease = redis.call('HGET', shard.leases, worker) or ''
  local epoch, slots, until_ms = string.match(lease, '^(%d+) (%d+) (%d+)$')
  if epoch and (until_ms == '0' or tonumber(until_ms) > now) then return epoch, tonumber(slots) end
end

local function slots_of_all()
  return whole(redis.call('GET', shard.lease_slots), 0)
end

-- Return how many turns a worker may hold before it leaves others to others: by its slots, its share of the trajectories
-- that are under way, and a little more. Where those are more than slots, all its slots.
local function share_of(slots)
  local total = slots_of_all()
  if total <= slots then return slots end
  return math.min(slots, math.ceil(SHARE_SLACK * redis.call('ZCARD', shard.begun) * slots / total))
end

-- Of times from now, in ms, the sooner; -1: never.
local function sooner(a, b)
  if a < 0 or b < 0 then return math.max(a, b) end
  return math.min(a, b)
end

-- Return how many of a stream's jobs to take, of `count` at most, with `room` left of the share: more than that only if
-- nobody else came for the next one. Returns also in how many ms to look again; -1: nothing is left to others.
local function within_share(stream, count, room, wall)
  if count <= 0 or count <= room then return count, -1 end
  room = math.max(room, 0)
  local entry = redis.call('XRANGE', stream, '-', '+', 'COUNT', room + 1)[room + 1]
  if not entry then return room, -1 end
  local left = tonumber(string.match(entry[1], '^%d+')) + READY_MS - wall
  if left > 0 and left <= READY_MS then return room, left end
  return count, -1
end
