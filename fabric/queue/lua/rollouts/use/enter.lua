-- How a group comes into a run: the checks are its caller's. Needs record, time, ring, length and first before it.
-- row: its key. like: quorum, priority and deadline_ms (0: none). at: where in ARGV its trajectories begin, each id, job.
-- keys shard.clock shard.counters shard.late shard.open shard.run trajectory.bell trajectory.job trajectory.ready
-- keys trajectory.record
local function weight_of(task, at)
  local weight = #task
  for i = at, #ARGV, 2 do weight = weight + #ARGV[i + 1] end
  return weight
end

local function enter(row, group_id, task, like, order, at)
  local ids, jobs, records, first, now = {}, {}, {}, first_fence(), now_ms(shard.clock, true)
  for i = at, #ARGV, 2 do
    ids[#ids + 1], records[ARGV[i]] = ARGV[i], new_record(first)
    add_pair(jobs, ARGV[i], ARGV[i + 1])
  end
  local size, weight = #ids, weight_of(task, at)
  tally(shard.run, 'depth', size)
  tally(shard.run, 'bytes', weight)
  redis.call('HSET', row, 'size', size, 'quorum', like.quorum, 'priority', like.priority, 'completed', 0, 'failed', 0,
    'cancelled', 0, 'state', 'open', 'bytes', weight, 'task', task, 'pushed', now, 'order', order)
  redis.call('HSET', shard.open, group_id, string.format('%s %s %s %d', like.priority, like.quorum, like.quorum, order))
  if like.deadline_ms > 0 then
    redis.call('ZADD', shard.late, now + like.deadline_ms, group_id)
    redis.call('HSET', row, 'deadline', now + like.deadline_ms)
  end
  call_in_parts('HSET', trajectory.job, jobs)
  write_records(trajectory.record, ids, records)
  make_ready(trajectory, ids, false)
  tally(shard.counters, 'groups_submitted', 1)
  tally(shard.counters, 'trajectories_submitted', size)
end
