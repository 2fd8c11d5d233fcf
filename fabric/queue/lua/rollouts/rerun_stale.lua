-- rerun_stale(group_id, entry_id, consumer, is_again, rerun_count_max, then per trajectory: id, dead_letter)
-- Rollouts of a complete group are too stale to be delivered: take the group back, and run them again.
-- A group that somebody may have used already (is_again) says so when it comes the next time.
-- Returns 1 the group is open again · 0 it is gone, was taken back before, or another consumer holds it (nothing written)
-- keys shard.counters shard.dead group.row trajectory.bell trajectory.ready trajectory.record
-- flags allow-oom
-- use batch parts count record claims look holder ring forget_turns drop close reopen
local group_id = ARGV[1]
if redis.call('HGET', group.row, 'state') ~= 'complete' or not may_end(ARGV[2], ARGV[3]) then return 0 end
if ARGV[4] == '1' then redis.call('HSET', group.row, 'redelivered', 1) end
local again, dead = {}, {}
for i = 6, #ARGV, 2 do
  local id = ARGV[i]
  local r = read_record(trajectory.record, id)
  if r and r.state == 'completed' then
    forget_rollout(id)
    tally(group.row, 'completed', -1)
    tally(shard.counters, 'trajectories_completed', -1)
    tally(shard.counters, 'rollouts_taken_back', 1)
    r.worker = '-'
    r.state = spend_attempt(r, 0, tonumber(ARGV[5])) and 'ready' or 'failed'
    write_record(trajectory.record, id, r)
    if r.state == 'ready' then again[#again + 1] = id else add_pair(dead, id, ARGV[i + 1]) end
  end
end
reopen(group_id, ARGV[2])
make_ready(trajectory, again, true)
call_in_parts('HSET', shard.dead, dead)
for _ = 1, #dead / 2 do
  if redis.call('HGET', group.row, 'state') == 'open' then close(group_id, 'failed') end
end
return 1
