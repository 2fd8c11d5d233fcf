-- settle_trajectory(id, fence, group_id, state, rollout, score_ms, worker, oldest_version, reward | '', token_count,
--   task_name | '', length)
-- End a trajectory exactly once: `completed`, or `scoring` while its reward is being computed (then score_ms is how
-- soon it must be asked for). `worker` holds the claim; it is '' when a trajectory that waits for its reward gets it.
-- Its loss is 0 again: agents that it cost are no losses of its reward, and those cost no agent of another attempt.
-- Returns 1 settled (also when asked again) · 0 the fence is stale · {2, head_version} its tokens are (nothing written)
-- keys shard.begun shard.clock shard.counters shard.lengths shard.rewards shard.run group.rollouts trajectory.deadline trajectory.log
-- keys trajectory.record
-- flags allow-oom
-- use batch parts count record claims look time suspect forget_turns drop close curve length
local id, fence, group_id, state = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local r = read_record(trajectory.record, id)
if r and r.fence == fence and r.state == state then return 1 end
local is_ours = r and r.fence == fence
  and (r.state == 'scoring' and ARGV[7] == '' or r.state == 'claimed' and r.worker == ARGV[7])
if not is_ours then
  tally_refused(shard.counters, 1)
  return 0
end
local facts, oldest = redis.call('HMGET', shard.run, 'head_version', 'staleness', 'when_stale'), tonumber(ARGV[8])
local head = whole(facts[1], -1)
if facts[3] == 'rerun' and oldest >= 0 and head - oldest > whole(facts[2], 0) then
  return {2, head}
end
end_claim(trajectory, id, r)
weigh(#ARGV[5] - redis.call('HSTRLEN', group.rollouts, id))
redis.call('HSET', group.rollouts, id, ARGV[5])
forget_turns(id)
redis.call('HDEL', trajectory.log, id)
clear(r)
r.state, r.worker = state, '-'
write_record(trajectory.record, id, r)
if state == 'scoring' then
  redis.call('ZADD', trajectory.deadline, now_ms(shard.clock) + tonumber(ARGV[6]), id)
else
  redis.call('ZREM', shard.begun, id)
  if ARGV[9] ~= '' then note_reward(shard.rewards, oldest, tonumber(ARGV[9]), tonumber(ARGV[10])) end
  note_length(ARGV[11], tonumber(ARGV[12]))
  close(group_id, 'completed')
end
return 1
