-- How a complete group leaves a run: kept for people to look at, or forgotten, and its name remembered, so that a
-- repeated push stays without effect. Needs batch, count, look and time before it. row: its size and bytes.
-- Returns 1, or 2 where more is kept than may be
-- keys shard.clock shard.completed shard.consumed shard.counters shard.kept shard.run group.kept_rollouts group.kept_row
-- keys group.rollouts group.row trajectory.job trajectory.record
local function leave(entry_id, group_id, row, consumed_count_max, kept_bytes_max, kept_count_max)
  redis.call('XACK', shard.completed, 'trainer', entry_id)
  redis.call('XDEL', shard.completed, entry_id)
  local size, ids = math.min(whole(row[1], 0), 10000), {} -- GROUP_SIZE_MAX of contract/limits.py
  for index = 0, size - 1 do ids[index + 1] = group_id .. '.' .. index end
  call_in_parts('HDEL', trajectory.record, ids)
  call_in_parts('HDEL', trajectory.job, ids)
  local bytes, kept_bytes = math.max(0, whole(row[2], 0)), 0
  if bytes <= kept_bytes_max and redis.call('EXISTS', group.rollouts) == 1 then
    redis.call('RENAME', group.row, group.kept_row)
    redis.call('RENAME', group.rollouts, group.kept_rollouts)
    local entry = redis.call('XADD', shard.kept, '*', 'group', group_id, 'bytes', bytes)
    redis.call('HSET', group.kept_row, 'ended', string.match(entry, '^%d+'))
    kept_bytes = tally(shard.run, 'kept_bytes', bytes)
  else
    redis.call('DEL', group.row, group.rollouts)
    kept_bytes = whole(redis.call('HGET', shard.run, 'kept_bytes'), 0)
  end
  tally(shard.run, 'depth', -size)
  tally(shard.run, 'bytes', -whole(row[2], 0))
  tally(shard.counters, 'groups_consumed', 1)
  redis.call('ZADD', shard.consumed, now_ms(shard.clock), group_id)
  redis.call('ZREMRANGEBYRANK', shard.consumed, 0, -consumed_count_max - 1)
  if kept_bytes > kept_bytes_max or redis.call('XLEN', shard.kept) > kept_count_max then return 2 end
  return 1
end
