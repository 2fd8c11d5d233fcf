-- renew(worker, claim_ms, then per job: id, fence, log | '')
-- Extend claims, and save what their jobs have made so far.
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] log hash   KEYS[4] clock
-- Returns per job 1 extended · 0 the claim is lost: drop the work
-- flags allow-oom
-- use batch record look time
local worker, until_ms = ARGV[1], now_ms(KEYS[4]) + tonumber(ARGV[2])
local answer = {}
for i = 3, #ARGV, 3 do
  local kept = is_held(redis.call('HGET', KEYS[1], ARGV[i]), ARGV[i + 1], worker)
  if kept then
    redis.call('ZADD', KEYS[2], until_ms, ARGV[i])
    if ARGV[i + 2] ~= '' then redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 2]) end
  end
  answer[#answer + 1] = kept and 1 or 0
end
return answer
