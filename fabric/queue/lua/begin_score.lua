-- begin_score(id, fence, worker, duration_ms, loss_max)
-- A reward worker begins to compute a reward. From here on its silence is counted as a loss (reap).
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] clock   KEYS[4] rollouts hash   KEYS[5] group hash
-- Returns {1, loss, rollout, task} begun · {2, loss} it has cost more than loss_max (nothing written) ·
-- {0} it does not wait for its reward any more, or another worker computes it
-- flags allow-oom
-- use batch record look time
local id, worker = ARGV[1], ARGV[3]
local r = read_record(KEYS[1], id)
if not r or r.state ~= 'scoring' or r.fence ~= tonumber(ARGV[2]) then return {0} end
if r.worker ~= '-' and r.worker ~= worker then return {0} end
if r.loss > tonumber(ARGV[5]) then return {2, r.loss} end
local rollout, task = redis.call('HGET', KEYS[4], id), redis.call('HGET', KEYS[5], 'task')
if not rollout or not task then return {0} end
r.worker = worker
write_record(KEYS[1], id, r)
redis.call('ZADD', KEYS[2], now_ms(KEYS[3]) + tonumber(ARGV[4]), id)
return {1, r.loss, rollout, task}
