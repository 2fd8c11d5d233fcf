-- renew(worker, claim_ms, then per job: id, fence, log | '', which part of it, what is there before, what is there then)
-- Extend claims, and save what their jobs have made so far. A trajectory's is whole, and its last three are ''. A turn's
-- first part is ''; others, ~1 and ~2, are written only where what is there is what the worker says.
-- Returns per job 1 extended, and saved · 2 extended, and not saved: the parts before are others · 0 the claim is lost:
-- drop the work
-- keys shard.clock jobs.deadline jobs.log jobs.record
-- flags allow-oom
-- use batch record look time
local worker, until_ms = ARGV[1], now_ms(shard.clock) + tonumber(ARGV[2])
local answer = {}
for i = 3, #ARGV, 6 do
  local id, log, part, before, after = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  local code = is_held(redis.call('HGET', jobs.record, id), ARGV[i + 1], worker) and 1 or 0
  if code == 1 then redis.call('ZADD', jobs.deadline, until_ms, id) end
  if code == 1 and log ~= '' then
    if part ~= '' and redis.call('HGET', jobs.log, id .. '~0') ~= before then code = 2
    elseif after ~= '' then redis.call('HSET', jobs.log, id .. part, log, id .. '~0', after)
    else redis.call('HSET', jobs.log, id, log) end
  end
  answer[#answer + 1] = code
end
return answer
