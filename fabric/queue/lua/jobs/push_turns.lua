-- push_turns(agent, then per turn: trajectory_id, fence, turn_id, turn_count_max, job, digests | '')
-- Ask for turns of trajectories that this agent holds. A turn's fences go on from its trajectory's, so that no number
-- is ever used twice, whatever is tried again. A trajectory has the turns from 0 to turn_count_max - 1 and no others,
-- however many agents have held it: what each of them counted for itself ends with it.
-- Returns per turn 1 pushed · 2 under way since an earlier agent: its result now comes here ·
-- 3 settled already: its result is in the inbox · 0 the trajectory's claim is lost (nothing written) ·
-- -1 it is none of the trajectory's turns (nothing written) ·
-- -2 the broker lacks an image of those whose digests are given, joined by blanks (nothing written)
-- keys shard.turn_agent shard.turn_image shard.turn_result trajectory.record turn.bell turn.job turn.ready turn.record inbox
-- flags allow-oom
-- use batch record ring
local agent = ARGV[1]
local trajectories, ids = {}, {}
for i = 2, #ARGV, 6 do
  trajectories[#trajectories + 1], ids[#ids + 1] = ARGV[i], ARGV[i + 2]
end
local owners, records = fetch_all(trajectory.record, trajectories), read_records(turn.record, ids)

local function is_turn_of(trajectory_id, id, count_max)
  local index = tonumber(string.match(string.sub(id, #trajectory_id + 2), '^%d+$'))
  return index and id == trajectory_id .. '.' .. index and index < tonumber(count_max)
end

local function lacks_image(trajectory_id, digests)
  local kept = digests ~= '' and redis.call('HGET', shard.turn_image, trajectory_id) or ''
  for digest in string.gmatch(digests, '%S+') do
    if not string.find(kept, digest, 1, true) then return true end
  end
end

local answer, agents, jobs, fresh = {}, {}, {}, {}
for n, id in ipairs(ids) do
  local r, fence = records[id], ARGV[6 * n - 3]
  answer[n] = 0
  if is_held(owners[n], fence, agent) and not is_turn_of(trajectories[n], id, ARGV[6 * n - 1]) then
    answer[n] = -1
  elseif is_held(owners[n], fence, agent) and not r and lacks_image(trajectories[n], ARGV[6 * n + 1]) then
    answer[n] = -2
  elseif is_held(owners[n], fence, agent) then
    add_pair(agents, id, agent)
    local result = r and r.state == 'settled' and redis.call('HGET', shard.turn_result, id)
    if not r or (r.state == 'settled' and not result) then -- the latter: somebody took its result away
      answer[n] = 1
      records[id] = r or new_record(tonumber(fence) * FENCES_PER_CLAIM)
      records[id].state, records[id].worker = 'ready', '-'
      fresh[#fresh + 1] = id
      add_pair(jobs, id, ARGV[6 * n])
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
make_ready(turn, fresh, false)
return answer
