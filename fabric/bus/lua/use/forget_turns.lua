-- Delete all that is kept of a trajectory's turns. `turn` = {record, deadline, held, job, log, agent, result}.
-- Turn ids count from 0 without holes, so the loop ends at the first one that was never pushed.
local function forget_turns(turn, trajectory_id)
  local index = 0
  while true do
    local id = trajectory_id .. '.' .. index
    local r = read_record(turn[1], id)
    if not r then return index end
    end_claim(turn[2], turn[3], id, r)
    redis.call('HDEL', turn[1], id)
    for i = 4, 7 do redis.call('HDEL', turn[i], id) end
    index = index + 1
  end
end
