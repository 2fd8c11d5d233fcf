-- A job's record is "state fence attempt loss worker"; see keys.py.
local function read_record(key, id)
  local value = redis.call('HGET', key, id)
  if not value then return nil end
  local state, fence, attempt, loss, worker = string.match(value, '^(%S+) (%d+) (%d+) (%d+) (%S+)$')
  return {state = state, fence = tonumber(fence), attempt = tonumber(attempt), loss = tonumber(loss), worker = worker}
end

local function write_record(key, id, r)
  redis.call('HSET', key, id, string.format('%s %d %d %d %s', r.state, r.fence, r.attempt, r.loss, r.worker))
end

-- End the claim that a record describes: no deadline, one claim less for its worker.
local function end_claim(deadline, held, id, r)
  redis.call('ZREM', deadline, id)
  if r.state == 'claimed' and redis.call('HINCRBY', held, r.worker, -1) <= 0 then
    redis.call('HDEL', held, r.worker)
  end
end

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
