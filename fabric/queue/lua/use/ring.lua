-- Put jobs back on (or onto) their ready streams and wake idle workers. Needs record.lua before it.
-- `kind` = the keys of trajectories or of turns; its `ready` are the streams of urgency 0 (first), 1, 2.
-- BELL_COUNT_MAX is in queue/keys.py.
-- keys shard.open
local PASSED_MS, LONG_GROUP, NEARNESS_IS_NOTHING = 60000, 1, 2

-- Whether the oldest job of a stream has waited so long that nothing which comes now may pass it.
local function has_waited(stream)
  local first, time = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1], redis.call('TIME')
  return first and tonumber(string.match(first[1], '^%d+')) + PASSED_MS <= time[1] * 1000 + time[2] / 1000
end

-- The class in which a job waits; a lower one is served first. One class before its group's priority is what somebody
-- had begun already (its prefix may still be cached, and its group is older), what belongs to a group with at most a
-- quarter of its quorum missing: a group is of use only when it is complete; and what will take long
-- (rules/queue/length.py), unless a job of its priority has waited for PASSED_MS.
local function urgency(row, was_held, ready)
  local priority, missing, quorum, order = string.match(row or '', '^([012]) (%-?%d+) (%d+) ?([0123]?)$')
  if not priority then priority, missing, quorum, order = 1, 1, 1, 0 end
  priority, order = tonumber(priority), tonumber(order) or 0
  local is_near = order < NEARNESS_IS_NOTHING and tonumber(missing) * 4 <= tonumber(quorum)
  local is_first = was_held or is_near or order % 2 == LONG_GROUP and not has_waited(ready[priority + 1])
  return is_first and math.max(0, priority - 1) or priority
end

local function group_of(id) return string.match(id, '^[^.]+') or id end

local function make_ready(kind, ids, was_held)
  local rings, classes = {}, {}
  for n, id in ipairs(ids) do
    local name = group_of(id)
    classes[name] = classes[name] or urgency(redis.call('HGET', shard.open, name), was_held, kind.ready) + 1
    redis.call('XADD', kind.ready[classes[name]], '*', 'id', id)
    if n <= 64 then rings[n] = '1' end
  end
  if #rings > 0 and redis.call('LPUSH', kind.bell, unpack(rings)) > 64 then redis.call('LTRIM', kind.bell, 0, 63) end
end
