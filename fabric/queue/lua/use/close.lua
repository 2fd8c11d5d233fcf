-- Ending a trajectory, and with it perhaps its group. Needs look.lua and drop.lua before it.
-- keys shard.clock shard.completed shard.counters shard.late shard.open shard.timings group.row
-- Count one attempt as failed, or with a rerun_max as too stale; whether the trajectory may run again.
local function spend_attempt(r, attempt_max, rerun_max)
  if rerun_max > 0 then
    r.rerun = r.rerun + 1
    tally(shard.counters, 'reruns', 1)
    return r.rerun < rerun_max
  end
  r.attempt = r.attempt + 1
  tally(shard.counters, 'attempts_failed', 1)
  return r.attempt < attempt_max
end

-- Count how long a group took, in the histogram that rules/queue/timings.py describes.
local function note_group_time()
  local pushed = whole(redis.call('HGET', group.row, 'pushed'))
  if not pushed then return end
  local _, now = look(shard.clock)
  local ms, place = math.max(0, now - pushed), 0
  while place < 23 and ms > 2 ^ place do place = place + 1 end
  tally(shard.timings, 'group broker ' .. place, 1)
  tally(shard.timings, 'group broker 24', string.format('%d', ms * 1000))
end

-- Hand a group to the trainer, without what has not ended. `ended_by` is all, quorum or deadline.
local function complete(group_id, ended_by)
  local dropped = drop_unfinished(group_id, whole(redis.call('HGET', group.row, 'size'), 0))
  tally(group.row, 'cancelled', dropped)
  redis.call('HDEL', shard.open, group_id)
  redis.call('ZREM', shard.late, group_id)
  local entry = redis.call('XADD', shard.completed, '*', 'group', group_id)
  redis.call('HSET', group.row, 'state', 'complete', 'ended_by', ended_by, 'entry', entry)
  tally(shard.counters, 'groups_completed', 1)
  note_group_time()
  if dropped > 0 then tally(shard.counters, 'trajectories_cancelled', dropped) end
end

-- Count one more of a group's trajectories as completed or failed; at its quorum, or with the last, it is complete.
-- Where there is no such group, somebody made its trajectory up.
local function close(group_id, outcome)
  if redis.call('HEXISTS', group.row, 'size') == 0 then return end
  tally(shard.counters, 'trajectories_' .. outcome, 1)
  tally(group.row, outcome, 1)
  local g = redis.call('HMGET', group.row, 'size', 'quorum', 'priority', 'completed', 'failed', 'cancelled', 'order')
  local size, quorum, completed = whole(g[1], 0), whole(g[2], 1), whole(g[4], 0)
  if completed >= quorum then
    complete(group_id, quorum < size and 'quorum' or 'all')
  elseif completed + whole(g[5], 0) + whole(g[6], 0) >= size then
    complete(group_id, 'all')
  else
    local row = string.format('%d %d %d %d', whole(g[3], 1), quorum - completed, quorum, whole(g[7], 0))
    redis.call('HSET', shard.open, group_id, row)
  end
end
