-- A job's record is "state fence attempt loss rerun blame seen inside worker"; see queue/keys.py. Needs batch.lua before it.
-- One that was written before there was suspicion has neither blame, seen nor inside. What is no record is nil.
local RECORD_LENGTH_MAX = 400 -- of which a worker's name may be most; none of its numbers grows beyond what %d can write

local function parse_record(value)
  local new, old = '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+)$', '^(%S+) (%d+) (%d+) (%d+) (%d+) (%S+)$'
  local state, fence, attempt, loss, rerun, blame, seen, inside, worker = string.match(value, new)
  if not state then state, fence, attempt, loss, rerun, worker = string.match(value, old) end
  if not state or #value > RECORD_LENGTH_MAX then return nil end
  return {state = state, fence = tonumber(fence), attempt = tonumber(attempt), loss = tonumber(loss),
    rerun = tonumber(rerun), blame = tonumber(blame or 0), seen = tonumber(seen or 0), inside = tonumber(inside or 1),
    worker = worker}
end

-- Whether a trajectory or turn may be called so: nobody waits for what has another name. Twin: queue/rows.py, is_job_name.
local function is_job(id)
  return #id <= 90 and string.find(id, '^%w[%w_%-]*%.%d+%.?%d*$') and string.byte(id, -1) ~= 46 -- no dot at the end
end

local FENCES_PER_CLAIM = 65536 -- of a turn, within one claim of its trajectory

local function new_record(fence)
  return {state = 'ready', fence = fence, attempt = 0, loss = 0, rerun = 0, blame = 0, seen = 0, inside = 1, worker = '-'}
end

local function read_record(key, id)
  local value = redis.call('HGET', key, id)
  return value and parse_record(value) or nil
end

-- Records by id. An id that stands twice in a batch has one record, so its second turn sees what the first did.
local function read_records(key, ids)
  local records = {}
  for n, value in ipairs(fetch_all(key, ids)) do
    if value and not records[ids[n]] then records[ids[n]] = parse_record(value) end
  end
  return records
end

-- Whether a worker holds a job under a fence, without parsing: most records are read for this alone.
local function is_held(value, fence, worker)
  local head, tail = 'claimed ' .. fence .. ' ', ' ' .. worker
  return value and string.sub(value, 1, #head) == head and string.sub(value, -#tail) == tail
end

local function format_record(r)
  return string.format('%s %d %d %d %d %d %d %d %s', r.state, r.fence, r.attempt, r.loss, r.rerun, r.blame, r.seen,
    r.inside, r.worker)
end

local function write_record(key, id, r)
  redis.call('HSET', key, id, format_record(r))
end

local function write_records(key, ids, records)
  local lines = {}
  for _, id in ipairs(ids) do add_pair(lines, id, format_record(records[id])) end
  call_in_parts('HSET', key, lines)
end
