-- close_group(group_id)
-- Complete a group at its deadline with what it has; what has not ended is cancelled.
-- Returns 1 complete · 0 it was before, or is gone
-- keys shard.late group.row
-- flags allow-oom
-- use batch parts count record claims look forget_turns drop close
if redis.call('HGET', group.row, 'state') ~= 'open' then
  redis.call('ZREM', shard.late, ARGV[1])
  return 0
end
complete(ARGV[1], 'deadline')
return 1
