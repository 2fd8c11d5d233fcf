-- settle_turns(worker, inbox_ttl_ms, then per turn: id, fence, agent, inbox, result, token_count)
-- Finish claimed turns exactly once and hand each result to the agent that waits for it.
-- Returns per turn 1 settled (also when asked again) · 0 the fence is stale (nothing written) ·
-- an agent id: another agent waits by now (nothing written); call again with its inbox
-- keys shard.counters shard.turn_agent shard.turn_result turn.deadline turn.held turn.job turn.log turn.record
-- keys inboxes...
-- flags allow-oom
-- use batch parts count record job_head claims
local worker = ARGV[1]
local ids = {}
for i = 3, #ARGV, 6 do ids[#ids + 1] = ARGV[i] end
local values, waiting = fetch_all(turn.record, ids), fetch_all(shard.turn_agent, ids)

local answer, settled, lines, results, reached, is_settled = {}, {}, {}, {}, {}, {}
local token_count, refused_count, resumed_count = 0, 0, 0
for n, id in ipairs(ids) do
  local i = 6 * n - 3
  local state, fence, holder = head_of(values[n])
  local code = 0
  if fence == ARGV[i + 1] and holder == worker then
    if state == 'settled' or is_settled[id] then
      code = 1
    elseif state == 'claimed' and waiting[n] and waiting[n] ~= ARGV[i + 2] then
      code = waiting[n]
    elseif state == 'claimed' then
      code, is_settled[id] = 1, true
      add_pair(lines, id, 'settled' .. string.sub(values[n], #'claimed' + 1))
      if tonumber(fence) % FENCES_PER_CLAIM > 1 then resumed_count = resumed_count + 1 end
      settled[#settled + 1] = id
      add_pair(results, id, ARGV[i + 4])
      token_count = token_count + tonumber(ARGV[i + 5])
      local inbox = inboxes[tonumber(ARGV[i + 3])]
      redis.call('XADD', inbox, '*', 'id', id, 'result', ARGV[i + 4])
      if not reached[inbox] then redis.call('PEXPIRE', inbox, ARGV[2]) end
      reached[inbox] = true
    end
  end
  if code == 0 then refused_count = refused_count + 1 end
  answer[n] = code
end
end_claims(turn, settled, worker)
call_in_parts('HSET', turn.record, lines)
call_in_parts('HDEL', turn.job, settled)
forget_logs(turn.log, settled)
call_in_parts('HSET', shard.turn_result, results)
if #settled > 0 then
  tally(shard.counters, 'turns_settled', #settled)
  tally(shard.counters, 'tokens', token_count)
  tally(shard.counters, 'turns_resumed', resumed_count)
end
if refused_count > 0 then tally_refused(shard.counters, refused_count) end
return answer
