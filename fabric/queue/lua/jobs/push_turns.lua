-- push_turns(agent, bell_ttl_ms, then per turn: trajectory_id, fence, turn_id, turn_count_max, job, digests | '', home |
--   '-', home_version, bell, tokens)
-- Ask for turns of trajectories that this agent holds. A turn's fences go on from its trajectory's, so that no number
-- is ever used twice, whatever is tried again. A trajectory has the turns from 0 to turn_count_max - 1 and no others,
-- however many agents have held it: what each of them counted for itself ends with it. A turn whose home (the worker
-- that may have its context in its cache) has a lease waits for that, and bells[bell] rings, unless the head is newer
-- than home_version; others are for anybody.
-- Returns per turn 1 pushed · 2 under way since an earlier agent: its result now comes here ·
-- 3 settled already: its result is in the inbox · 0 the trajectory's claim is lost (nothing written) ·
-- -1 it is none of the trajectory's turns (nothing written) ·
-- -2 the broker lacks an image of those whose digests are given, joined by blanks (nothing written)
-- keys shard.begun shard.clock shard.lease_slots shard.leases shard.open shard.run shard.turn_agent
-- keys shard.turn_image shard.turn_result trajectory.record turn.bell turn.held turn.job turn.ready turn.record inbox bells...
-- flags allow-oom
-- use batch count record look ring share homed home asked
local agent = ARGV[1]
local trajectories, ids = {}, {}
for i = 3, #ARGV, 10 do
  trajectories[#trajectories + 1], ids[#ids + 1] = ARGV[i], ARGV[i + 2]
end
local owners, records = fetch_all(trajectory.record, trajectories), read_records(turn.record, ids)

local answer, agents, jobs, fresh, anywhere, is_for_suited = {}, {}, {}, {}, {}, false
for n, id in ipairs(ids) do
  local i = 10 * n - 7
  local r, fence = records[id], ARGV[i + 1]
  answer[n] = 0
  if is_held(owners[n], fence, agent) and not is_turn_of(trajectories[n], id, ARGV[i + 3]) then
    answer[n] = -1
  elseif is_held(owners[n], fence, agent) and not r and lacks_image(trajectories[n], ARGV[i + 5]) then
    answer[n] = -2
  elseif is_held(owners[n], fence, agent) then
    add_pair(agents, id, agent)
    local result = r and r.state == 'settled' and redis.call('HGET', shard.turn_result, id)
    if not r or (r.state == 'settled' and not result) then -- the latter: somebody took its result away
      answer[n] = 1
      records[id] = r or new_record(tonumber(fence) * FENCES_PER_CLAIM)
      records[id].state, records[id].worker = 'ready', '-'
      fresh[#fresh + 1] = id
      local sent = is_sent_home(id, ARGV[i + 6], ARGV[i + 7], bells[tonumber(ARGV[i + 8])], ARGV[i + 9], ARGV[2])
      if not sent then anywhere[#anywhere + 1] = id end
      is_for_suited = is_for_suited or sent == SUITED
      add_pair(jobs, id, ARGV[i + 4])
    elseif r.state == 'settled' then
      answer[n] = 3
      redis.call('XADD', inbox, '*', 'id', id, 'result', result)
    else
      answer[n] = 2
    end
  end
end
call_in_parts('HSET', shard.turn_agent, agents)
call_in_parts('HSET', turn.job, jobs)
write_records(turn.record, fresh, records)
make_ready(turn, anywhere, false)
if is_for_suited then ring_all() end
return answer
