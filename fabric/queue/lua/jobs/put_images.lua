-- put_images(agent, trajectory_id, fence, then per image: digest, file)
-- Keep images of a trajectory that this agent holds for whoever generates its turns, until the trajectory ends.
-- Returns 1 kept · 0 the claim is lost (nothing written)
-- keys shard.turn_image trajectory.record
-- flags allow-oom
-- use batch record
local agent, id = ARGV[1], ARGV[2]
if not is_held(redis.call('HGET', trajectory.record, id), ARGV[3], agent) then return 0 end
local names, files = redis.call('HGET', shard.turn_image, id) or '', {}
for i = 4, #ARGV, 2 do
  add_pair(files, id .. '/' .. ARGV[i], ARGV[i + 1])
  if not string.find(names, ARGV[i], 1, true) then names = names .. ' ' .. ARGV[i] end
end
call_in_parts('HSET', shard.turn_image, files)
redis.call('HSET', shard.turn_image, id, names)
return 1
