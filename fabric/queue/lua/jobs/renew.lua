-- renew(worker, claim_ms, then per job: id, fence, log | '', which part of it: '', ~1 or ~2)
-- Extend claims, and save what their jobs have made so far.
-- Returns per job 1 extended · 0 the claim is lost: drop the work
-- keys shard.clock jobs.deadline jobs.log jobs.record
-- flags allow-oom
-- use batch record look time
local worker, until_ms = ARGV[1], now_ms(shard.clock) + tonumber(ARGV[2])
local answer = {}
for i = 3, #ARGV, 4 do
  local kept = is_held(redis.call('HGET', jobs.record, ARGV[i]), ARGV[i + 1], worker)
  if kept then
    redis.call('ZADD', jobs.deadline, until_ms, ARGV[i])
    if ARGV[i + 2] ~= '' then redis.call('HSET', jobs.log, ARGV[i] .. ARGV[i + 3], ARGV[i + 2]) end
  end
  answer[#answer + 1] = kept and 1 or 0
end
return answer
