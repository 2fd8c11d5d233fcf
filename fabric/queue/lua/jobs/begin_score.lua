-- begin_score(id, fence, worker, duration_ms, loss_max)
-- A reward worker begins to compute a reward. From here on its silence is counted as a loss (reap).
-- Returns {1, loss, rollout, task} begun · {2, loss} it has cost more than loss_max (nothing written) ·
-- {0} it does not wait for its reward any more, or another worker computes it
-- keys shard.clock group.rollouts group.row trajectory.deadline trajectory.record
-- flags allow-oom
-- use batch record look time
local id, worker = ARGV[1], ARGV[3]
local r = read_record(trajectory.record, id)
if not r or r.state ~= 'scoring' or r.fence ~= tonumber(ARGV[2]) then return {0} end
if r.worker ~= '-' and r.worker ~= worker then return {0} end
if r.loss > tonumber(ARGV[5]) then return {2, r.loss} end
local rollout, task = redis.call('HGET', group.rollouts, id), redis.call('HGET', group.row, 'task')
if not rollout or not task then return {0} end
r.worker = worker
write_record(trajectory.record, id, r)
redis.call('ZADD', trajectory.deadline, now_ms(shard.clock) + tonumber(ARGV[4]), id)
return {1, r.loss, rollout, task}
