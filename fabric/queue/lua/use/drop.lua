-- What a group holds, and how it is dropped. Needs forget_turns.lua before it.
-- keys shard.begun shard.run group.rollouts group.row trajectory.deadline trajectory.held trajectory.job trajectory.log
-- keys trajectory.record

-- Count bytes that the run holds, on the run and on the group that will take them with it.
local function weigh(bytes)
  tally(shard.run, 'bytes', bytes)
  tally(group.row, 'bytes', bytes)
end

local function forget_rollout(id)
  local bytes = redis.call('HSTRLEN', group.rollouts, id)
  if bytes > 0 then
    weigh(-bytes)
    redis.call('HDEL', group.rollouts, id)
  end
end

local GROUP_SIZE_MAX = 10000 -- contract/limits.py: what a group's row says beyond is not believed

-- Drop what has not ended; its workers learn it at their next renewal. Returns how many.
local function drop_unfinished(group_id, size)
  local count = 0
  for index = 0, math.min(size, GROUP_SIZE_MAX) - 1 do
    local id = group_id .. '.' .. index
    local r = read_record(trajectory.record, id)
    if r and r.state ~= 'completed' and r.state ~= 'failed' then
      end_claim(trajectory, id, r)
      redis.call('ZREM', shard.begun, id)
      forget_turns(id)
      forget_rollout(id)
      for _, key in ipairs({trajectory.record, trajectory.job, trajectory.log}) do redis.call('HDEL', key, id) end
      count = count + 1
    end
  end
  return count
end
