-- settle_turns(worker, inbox_ttl_ms, then per turn: id, fence, agent, inbox, result, token_count)
-- Finish claimed turns exactly once and hand each result to the agent that waits for it.
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] held hash   KEYS[4] job hash   KEYS[5] log hash
--   KEYS[6] turn agent hash   KEYS[7] turn result hash   KEYS[8] counters
--   KEYS[8 + inbox] inbox streams of the agents
-- Returns per turn 1 settled (also when asked again) · 0 the fence is stale (nothing written) ·
-- an agent id: another agent waits by now (nothing written); call again with its inbox
-- flags allow-oom
-- use batch count record hold
local worker = ARGV[1]
local ids = {}
for i = 3, #ARGV, 6 do ids[#ids + 1] = ARGV[i] end
local records, waiting = read_records(KEYS[1], ids), fetch_all(KEYS[6], ids)

local answer, settled, results, reached = {}, {}, {}, {}
local token_count, refused_count, resumed_count = 0, 0, 0
for n, id in ipairs(ids) do
  local i = 6 * n - 3
  local r, code = records[id], 0
  if r and r.fence == tonumber(ARGV[i + 1]) and r.worker == worker then
    if r.state == 'settled' then
      code = 1
    elseif r.state == 'claimed' and waiting[n] and waiting[n] ~= ARGV[i + 2] then
      code = waiting[n]
    elseif r.state == 'claimed' then
      code = 1
      r.state = 'settled'
      if r.fence % FENCES_PER_CLAIM > 1 then resumed_count = resumed_count + 1 end
      settled[#settled + 1] = id
      add_pair(results, id, ARGV[i + 4])
      token_count = token_count + tonumber(ARGV[i + 5])
      local inbox = KEYS[8 + tonumber(ARGV[i + 3])]
      redis.call('XADD', inbox, '*', 'id', id, 'result', ARGV[i + 4])
      if not reached[inbox] then redis.call('PEXPIRE', inbox, ARGV[2]) end
      reached[inbox] = true
    end
  end
  if code == 0 then refused_count = refused_count + 1 end
  answer[n] = code
end
end_claims(KEYS[2], KEYS[3], settled, worker)
write_records(KEYS[1], settled, records)
call_in_parts('HDEL', KEYS[4], settled)
call_in_parts('HDEL', KEYS[5], settled)
call_in_parts('HSET', KEYS[7], results)
if #settled > 0 then
  tally(KEYS[8], 'turns_settled', #settled)
  tally(KEYS[8], 'tokens', token_count)
  tally(KEYS[8], 'turns_resumed', resumed_count)
end
if refused_count > 0 then tally(KEYS[8], 'refused', refused_count) end
return answer
