-- look_begun(first, count, trajectory_id…)
-- Read how far trajectories have come: those named, or else `count` of those that agents have taken, the oldest first.
-- Returns {how many agents have taken, now, {id, begun_ms | '', record | '', turn_count, settled_count, last turn's record | ''}…}
-- keys shard.begun shard.clock trajectory.record turn.record
-- use batch count look
local ids, begun = {}, {}
if #ARGV > 2 then
  for n = 3, #ARGV do ids[n - 2] = ARGV[n] end
elseif tonumber(ARGV[2]) > 0 then
  ids = redis.call('ZRANGE', shard.begun, tonumber(ARGV[1]), tonumber(ARGV[1]) + tonumber(ARGV[2]) - 1)
end

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
local answer, records = {redis.call('ZCARD', shard.begun), now}, fetch_all(trajectory.record, ids)
for n, id in ipairs(ids) do
  local count, settled, last = turns_of(id)
  answer[n + 2] = {id, redis.call('ZSCORE', shard.begun, id) or '', records[n] or '', count, settled, last}
end
return answer
