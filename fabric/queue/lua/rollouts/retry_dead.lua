-- retry_dead(group_id, is_dry 0 | 1, then ids of its trajectories)
-- Let trajectories that were given up run again, with all attempts, in their own group: a rollout of another group is of
-- no use to whoever waits for this one. A complete group that nobody has received is taken back for it.
-- Returns for each id 1 it runs again · 0 no such dead letter · -1 its group is consumed or cancelled · -2 somebody has
-- received it · -3 it had its quorum · -4 its deadline has passed. Nothing is written below 1, or where it is dry.
-- keys shard.clock shard.completed shard.counters shard.dead group.row trajectory.bell trajectory.ready
-- keys trajectory.record
-- flags allow-oom
-- use batch count record look ring reopen
local group_id, is_dry = ARGV[1], ARGV[2] == '1'
local g = redis.call('HMGET', group.row, 'size', 'state', 'ended_by', 'deadline', 'entry')
local _, now = look(shard.clock)

local function refusal()
  if not g[1] then return -1 end
  if g[2] == 'complete' and g[3] == 'quorum' then return -3 end
  if whole(g[4], now + 1) <= now or g[2] == 'complete' and g[3] == 'deadline' then return -4 end
  local is_free = g[5] and #redis.call('XPENDING', shard.completed, 'trainer', g[5], g[5], 1) == 0
  return g[2] == 'complete' and not is_free and -2 or nil
end

local code, answer, again, records = refusal() or 1, {}, {}, {}
for n = 3, #ARGV do
  local id, r = ARGV[n], read_record(trajectory.record, ARGV[n])
  local is_there = redis.call('HEXISTS', shard.dead, id) == 1 and not records[id]
  answer[n - 2] = is_there and (code < 0 and code or r and r.state == 'failed' and 1) or 0
  if answer[n - 2] == 1 then
    again[#again + 1], records[id] = id, new_record(r.fence)
  end
end
if is_dry or #again == 0 then return answer end
if g[2] == 'complete' then reopen(group_id, g[5]) end
write_records(trajectory.record, again, records)
call_in_parts('HDEL', shard.dead, again)
tally(group.row, 'failed', -#again)
tally(shard.counters, 'trajectories_failed', -#again)
make_ready(trajectory, again, true)
return answer
