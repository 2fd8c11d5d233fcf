-- What is required of a turn that is asked for.
-- keys shard.turn_image
local function is_turn_of(trajectory_id, id, count_max)
  local index = tonumber(string.match(string.sub(id, #trajectory_id + 2), '^%d+$'))
  return index and id == trajectory_id .. '.' .. index and index < tonumber(count_max)
end

local function lacks_image(trajectory_id, digests)
  local kept = digests ~= '' and redis.call('HGET', shard.turn_image, trajectory_id) or ''
  for digest in string.gmatch(digests, '%S+') do
    if not string.find(kept, digest, 1, true) then return true end
  end
end
