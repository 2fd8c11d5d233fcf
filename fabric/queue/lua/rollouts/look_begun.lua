-- look_begun(trajectory_id…)
-- Read how far trajectories have come.
-- Returns {now, {id, begun_ms | '', record | '', turn_count, settled_count, last turn's record | ''}…}
-- keys shard.begun shard.clock trajectory.record turn.record
-- flags allow-oom
-- use batch count look

-- Turn ids count from 0 without holes.
local function turns_of(id)
  local count, settled, last = 0, 0, ''
  while true do
    local asked = {}
    for n = 1, 8 do asked[n] = id .. '.' .. (count + n - 1) end
    for _, value in ipairs(redis.call('HMGET', turn.record, unpack(asked))) do
      if not value then return count, settled, last end
      count, last = count + 1, value
      if string.sub(value, 1, 8) == 'settled ' then settled = settled + 1 end
    end
  end
end

local _, now = look(shard.clock)
local answer, records = {now}, fetch_all(trajectory.record, ARGV)
for n, id in ipairs(ARGV) do
  answer[n + 1] = {id, redis.call('ZSCORE', shard.begun, id) or '', records[n] or '', turns_of(id)}
end
return answer
