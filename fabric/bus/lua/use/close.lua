-- Count one more of a group's trajectories as ended; the last one completes the group.
-- `outcome` is completed or failed. Returns 1 when the group is now complete.
local function close(group, completed, counters, group_id, outcome)
  redis.call('HINCRBY', counters, 'trajectories_' .. outcome, 1)
  if outcome == 'failed' then redis.call('HINCRBY', group, 'failed', 1) end
  if redis.call('HINCRBY', group, 'closed', 1) < tonumber(redis.call('HGET', group, 'size')) then return 0 end
  redis.call('HSET', group, 'state', 'complete')
  redis.call('XADD', completed, '*', 'group', group_id)
  redis.call('HINCRBY', counters, 'groups_completed', 1)
  return 1
end
