-- Taking a complete group back: what of it runs again makes it complete again. Needs count.lua before it.
-- Its deadline holds again, also one that has passed: then whoever reaps next completes it with what it has.
-- keys shard.completed shard.counters shard.late shard.open group.row
local function reopen(group_id, entry_id)
  redis.call('XACK', shard.completed, 'trainer', entry_id)
  redis.call('XDEL', shard.completed, entry_id)
  redis.call('HSET', group.row, 'state', 'open')
  tally(shard.counters, 'groups_completed', -1)
  tally(shard.counters, 'groups_taken_back', 1)
  local g = redis.call('HMGET', group.row, 'quorum', 'priority', 'completed', 'deadline', 'order')
  local quorum, deadline = whole(g[1], 1), whole(g[4], nil)
  local row = string.format('%d %d %d %d', whole(g[2], 1), quorum - whole(g[3], 0), quorum, whole(g[5], 0))
  redis.call('HSET', shard.open, group_id, row)
  if deadline then redis.call('ZADD', shard.late, deadline, group_id) end
end
