-- lose_score(id, fence, worker, loss, loss_max)
-- The process that computed a reward was lost: it ended, hung or filled its memory. The reward is asked for again at
-- once, as long as it has cost less than loss_max; the rollout stays as it is. Said twice, it counts once.
-- Returns 1 asked for again · 2 the caller must give it up, under this fence · 0 it does not wait any more
-- keys shard.clock shard.counters trajectory.deadline trajectory.record
-- flags allow-oom
-- use batch count record look time
local id = ARGV[1]
local r = read_record(trajectory.record, id)
if not r or r.state ~= 'scoring' or r.fence ~= tonumber(ARGV[2]) then return 0 end
if r.worker == ARGV[3] then
  tally(shard.counters, 'rewards_lost', 1)
  r.loss, r.worker = r.loss + tonumber(ARGV[4]), '-'
  write_record(trajectory.record, id, r)
  redis.call('ZADD', trajectory.deadline, now_ms(shard.clock), id)
end
return r.loss < tonumber(ARGV[5]) and 1 or 2
