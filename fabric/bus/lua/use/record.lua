-- A job's record is "state fence attempt loss worker"; see keys.py. Needs batch.lua before it.
local function parse_record(value)
  local state, fence, attempt, loss, worker = string.match(value, '^(%S+) (%d+) (%d+) (%d+) (%S+)$')
  return {state = state, fence = tonumber(fence), attempt = tonumber(attempt), loss = tonumber(loss), worker = worker}
end

local function new_record()
  return {state = 'ready', fence = 0, attempt = 0, loss = 0, worker = '-'}
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
  return string.format('%s %d %d %d %s', r.state, r.fence, r.attempt, r.loss, r.worker)
end

local function write_record(key, id, r)
  redis.call('HSET', key, id, format_record(r))
end

local function write_records(key, ids, records)
  local lines = {}
  for _, id in ipairs(ids) do add_pair(lines, id, format_record(records[id])) end
  call_in_parts('HSET', key, lines)
end

local function hold_less(held, worker, count)
  if redis.call('HINCRBY', held, worker, -count) <= 0 then redis.call('HDEL', held, worker) end
end

-- End the claim that a record describes: no deadline (a trajectory that waits for its reward has one too), one less held.
local function end_claim(deadline, held, id, r)
  redis.call('ZREM', deadline, id)
  if r.state == 'claimed' then hold_less(held, r.worker, 1) end
end

-- End claims of one worker.
local function end_claims(deadline, held, ids, worker)
  if #ids == 0 then return end
  call_in_parts('ZREM', deadline, ids)
  hold_less(held, worker, #ids)
end
