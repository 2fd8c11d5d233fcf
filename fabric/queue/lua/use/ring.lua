-- Put jobs back on (or onto) their ready streams and wake idle workers. Needs record.lua before it.
-- `kind` = the keys of trajectories or of turns; its `ready` are the streams of urgency 0 (first), 1, 2.
-- BELL_COUNT_MAX is in queue/keys.py.
-- keys shard.open

-- The class in which a job waits; a lower one is served first. One class before its group's priority is what somebody
-- had begun already (its prefix may still be cached, and its group is older), and what belongs to a group with at most a
-- quarter of its quorum missing: a group is of use only when it is complete.
local function urgency(row, was_held)
  local priority, missing, quorum = string.match(row or '', '^([012]) (%-?%d+) (%d+)$')
  if not priority then priority, missing, quorum = 1, 1, 1 end
  priority = tonumber(priority)
  if was_held or tonumber(missing) * 4 <= tonumber(quorum) then priority = math.max(0, priority - 1) end
  return priority
end

local function group_of(id) return string.match(id, '^[^.]+') or id end

local function make_ready(kind, ids, was_held)
  local rings, rows = {}, {}
  for n, id in ipairs(ids) do
    local name = group_of(id)
    if rows[name] == nil then rows[name] = redis.call('HGET', shard.open, name) end
    redis.call('XADD', kind.ready[urgency(rows[name], was_held) + 1], '*', 'id', id)
    if n <= 64 then rings[n] = '1' end
  end
  if #rings > 0 and redis.call('LPUSH', kind.bell, unpack(rings)) > 64 then redis.call('LTRIM', kind.bell, 0, 63) end
end
