-- Delete all that is kept of a trajectory's turns. `turn` = {record, deadline, held, job, log, agent, result}.
-- Turn ids count from 0 without holes, so the search ends at the first one that was never pushed.
local function forget_turns(turn, trajectory_id)
  local ids, unsettled, is_last = {}, {}, false
  while not is_last do
    local asked = {}
    for n = 1, 8 do asked[n] = trajectory_id .. '.' .. (#ids + n - 1) end
    for n, value in ipairs(redis.call('HMGET', turn[1], unpack(asked))) do
      is_last = not value
      if is_last then break end
      ids[#ids + 1] = asked[n]
      if string.sub(value, 1, 8) ~= 'settled ' then
        unsettled[#unsettled + 1] = asked[n]
        end_claim(turn[2], turn[3], asked[n], parse_record(value))
      end
    end
  end
  for _, n in ipairs({1, 6, 7}) do call_in_parts('HDEL', turn[n], ids) end
  for _, n in ipairs({4, 5}) do call_in_parts('HDEL', turn[n], unsettled) end -- settling deleted the others'
end
