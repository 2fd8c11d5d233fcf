-- settle_turns(worker, inbox_ttl_ms, then per turn: id, fence, agent, result, token_count)
-- Finish claimed turns exactly once and hand each result to the agent that waits for it.
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] held hash   KEYS[4] job hash   KEYS[5] log hash
--   KEYS[6] turn agent hash   KEYS[7] turn result hash   KEYS[8] counters
--   KEYS[8 + n] inbox stream of the n-th turn's agent
-- Returns per turn 1 settled (also when asked again) · 0 the fence is stale (nothing written) ·
-- an agent id: another agent waits by now (nothing written); call again with its inbox
-- use record
local worker = ARGV[1]
local answer = {}
for n = 1, (#ARGV - 2) / 5 do
  local i = 5 * n - 2
  local id, fence, agent = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
  local r = read_record(KEYS[1], id)
  local code = 0
  if r and r.fence == fence and r.worker == worker then
    local waiting = redis.call('HGET', KEYS[6], id)
    if r.state == 'settled' then
      code = 1
    elseif r.state == 'claimed' and waiting ~= agent then
      code = waiting
    elseif r.state == 'claimed' then
      code = 1
      end_claim(KEYS[2], KEYS[3], id, r)
      r.state = 'settled'
      write_record(KEYS[1], id, r)
      redis.call('HDEL', KEYS[4], id)
      redis.call('HDEL', KEYS[5], id)
      redis.call('HSET', KEYS[7], id, ARGV[i + 3])
      redis.call('XADD', KEYS[8 + n], '*', 'id', id, 'result', ARGV[i + 3])
      redis.call('PEXPIRE', KEYS[8 + n], ARGV[2])
      redis.call('HINCRBY', KEYS[8], 'turns_settled', 1)
      redis.call('HINCRBY', KEYS[8], 'tokens', ARGV[i + 4])
    end
  end
  if code == 0 then redis.call('HINCRBY', KEYS[8], 'refused', 1) end
  answer[#answer + 1] = code
end
return answer
