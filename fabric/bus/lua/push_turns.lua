-- push_turns(agent, then per turn: trajectory_id, fence, turn_id, job)
-- Ask for turns of trajectories that this agent holds.
--   KEYS[1] trajectory record hash
--   KEYS[2] ready stream   KEYS[3] bell   KEYS[4] job hash   KEYS[5] record hash    of turns
--   KEYS[6] turn agent hash   KEYS[7] turn result hash   KEYS[8] inbox stream of this agent
-- Returns per turn 1 pushed · 2 under way since an earlier agent: its result now comes here ·
-- 3 settled already: its result is in the inbox · 0 the trajectory's claim is lost (nothing written)
-- use record ring
local agent = ARGV[1]
local answer = {}
for i = 2, #ARGV, 4 do
  local id, code = ARGV[i + 2], 0
  local owner = read_record(KEYS[1], ARGV[i])
  if owner and owner.state == 'claimed' and owner.worker == agent and owner.fence == tonumber(ARGV[i + 1]) then
    local r = read_record(KEYS[5], id)
    redis.call('HSET', KEYS[6], id, agent)
    if not r then
      code = 1
      redis.call('HSET', KEYS[4], id, ARGV[i + 3])
      write_record(KEYS[5], id, {state = 'ready', fence = 0, attempt = 0, loss = 0, worker = '-'})
      make_ready(KEYS[2], KEYS[3], id)
    elseif r.state == 'settled' then
      code = 3
      redis.call('XADD', KEYS[8], '*', 'id', id, 'result', redis.call('HGET', KEYS[7], id))
    else
      code = 2
    end
  end
  answer[#answer + 1] = code
end
return answer
