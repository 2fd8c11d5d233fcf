-- Delete all that is kept of a trajectory's turns. Needs claims.lua and parts.lua before it.
-- Turn ids count from 0 without holes, so the search ends at the first one that was never pushed.
-- keys shard.turn_agent shard.turn_image shard.turn_result turn.deadline turn.held turn.job turn.log turn.record
local function forget_turns(trajectory_id)
  local ids, unsettled, is_last = {}, {}, false
  while not is_last do
    local asked = {}
    for n = 1, 8 do asked[n] = trajectory_id .. '.' .. (#ids + n - 1) end
    for n, value in ipairs(redis.call('HMGET', turn.record, unpack(asked))) do
      is_last = not value
      if is_last then break end
      ids[#ids + 1] = asked[n]
      if string.sub(value, 1, 8) ~= 'settled ' then
        unsettled[#unsettled + 1] = asked[n]
        end_claim(turn, asked[n], parse_record(value))
      end
    end
  end
  for _, key in ipairs({turn.record, shard.turn_agent, shard.turn_result}) do call_in_parts('HDEL', key, ids) end
  call_in_parts('HDEL', turn.job, unsettled) -- settling deleted the others'
  forget_logs(turn.log, unsettled)
  local digests = redis.call('HGET', shard.turn_image, trajectory_id)
  if digests then
    local files = {trajectory_id}
    for digest in string.gmatch(digests, '%S+') do files[#files + 1] = trajectory_id .. '/' .. digest end
    call_in_parts('HDEL', shard.turn_image, files)
  end
end
