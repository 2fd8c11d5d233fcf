-- What a group holds, and how it is dropped. KEYS[1..19] are those of shards.ending_keys:
--   [1..5] trajectory record, deadline, held, job, log      [6..12] turn record, deadline, held, job, log, agent, result
--   [13] group hash   [14] rollouts hash   [15] completed stream   [16] counters   [17] run hash   [18] open hash
--   [19] late zset
local TURN_KEYS = {KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]}

-- Count bytes that the run holds, on the run and on the group that will take them with it.
local function weigh(bytes)
  tally(KEYS[17], 'bytes', bytes)
  tally(KEYS[13], 'bytes', bytes)
end

local function forget_rollout(id)
  local bytes = redis.call('HSTRLEN', KEYS[14], id)
  if bytes > 0 then
    weigh(-bytes)
    redis.call('HDEL', KEYS[14], id)
  end
end

local GROUP_SIZE_MAX = 10000 -- contract/limits.py: what a group's row says beyond is not believed

-- Drop what has not ended; its workers learn it at their next renewal. Returns how many.
local function drop_unfinished(group_id, size)
  local count = 0
  for index = 0, math.min(size, GROUP_SIZE_MAX) - 1 do
    local id = group_id .. '.' .. index
    local r = read_record(KEYS[1], id)
    if r and r.state ~= 'completed' and r.state ~= 'failed' then
      end_claim(KEYS[2], KEYS[3], id, r)
      forget_turns(TURN_KEYS, id)
      forget_rollout(id)
      for _, key in ipairs({KEYS[1], KEYS[4], KEYS[5]}) do redis.call('HDEL', key, id) end
      count = count + 1
    end
  end
  return count
end
