-- cancel_turns(agent, then per turn: trajectory_id, fence, turn_id, result)
-- Give up turns that this agent asked for: each is settled with the given result, which goes to the inbox like any. A
-- worker that makes one finds its claim lost.
-- Returns per turn 1 given up · 2 it was settled before · 0 the trajectory's claim is lost, or nobody asked for the turn
-- keys shard.turn_result trajectory.record turn.deadline turn.held turn.job turn.log turn.record inbox
-- flags allow-oom
-- use batch parts count record claims
local agent = ARGV[1]
local trajectories, ids = {}, {}
for i = 2, #ARGV, 4 do
  trajectories[#trajectories + 1], ids[#ids + 1] = ARGV[i], ARGV[i + 2]
end
local owners, records = fetch_all(trajectory.record, trajectories), read_records(turn.record, ids)

local answer, ended, results = {}, {}, {}
for n, id in ipairs(ids) do
  local r, result = records[id], ARGV[4 * n + 1]
  answer[n] = 0
  if r and is_held(owners[n], ARGV[4 * n - 1], agent) then
    answer[n] = 2
    if r.state ~= 'settled' then
      answer[n] = 1
      end_claim(turn, id, r)
      r.state, r.worker = 'settled', '-'
      ended[#ended + 1] = id
      add_pair(results, id, result)
      redis.call('XADD', inbox, '*', 'id', id, 'result', result)
    end
  end
end
write_records(turn.record, ended, records)
call_in_parts('HDEL', turn.job, ended)
forget_logs(turn.log, ended)
call_in_parts('HSET', shard.turn_result, results)
return answer
