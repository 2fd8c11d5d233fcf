-- fail_trajectory(id, fence, group_id, dead_letter, attempt_count_max, rerun_count_max | 0)
-- One attempt has failed: try again from the start, or give up into the dead letters. Never a reward of 0.
-- With a rerun_count_max it did not fail, but came to an end too stale; that is counted apart.
-- Returns 2 waiting for the next attempt · 3 in the dead letters · 0 the fence is stale (nothing written)
-- keys shard.begun shard.counters shard.dead trajectory.bell trajectory.log trajectory.ready trajectory.record
-- flags allow-oom
-- use batch parts count record claims look ring suspect forget_turns drop close
local id, fence, group_id = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local r = read_record(trajectory.record, id)
if not r or r.fence ~= fence or (r.state ~= 'claimed' and r.state ~= 'scoring') then return 0 end
end_claim(trajectory, id, r)
forget_turns(id)
forget_rollout(id)
redis.call('HDEL', trajectory.log, id)
r.worker = '-'
if r.state == 'scoring' and ARGV[6] == '0' then tally(shard.counters, 'rewards_failed', 1) end
clear(r)  -- whoever says so lives
if spend_attempt(r, tonumber(ARGV[5]), tonumber(ARGV[6])) then
  r.state = 'ready'
  write_record(trajectory.record, id, r)
  make_ready(trajectory, {id}, true)
  return 2
end
r.state = 'failed'
redis.call('ZREM', shard.begun, id)
write_record(trajectory.record, id, r)
redis.call('HSET', shard.dead, id, ARGV[4])
close(group_id, 'failed')
return 3
