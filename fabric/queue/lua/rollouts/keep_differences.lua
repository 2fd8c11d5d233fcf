-- keep_differences(then per trajectory: trajectory_id, differences)
-- Keep beside a group how far a trainer's log-probabilities are from the workers', for people to look at; what was kept of
-- an earlier comparison is replaced.
-- Returns 1 kept · 0 the group is gone (nothing written)
-- keys shard.run group.row
-- use count
if redis.call('HEXISTS', group.row, 'size') == 0 then return 0 end
local grown = 0
for i = 1, #ARGV, 2 do
  local field = 'differences:' .. ARGV[i]
  grown = grown + #ARGV[i + 1] - redis.call('HSTRLEN', group.row, field)
  redis.call('HSET', group.row, field, ARGV[i + 1])
end
tally(shard.run, 'bytes', grown)
tally(group.row, 'bytes', grown)
return 1
