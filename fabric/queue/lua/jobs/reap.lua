-- reap(reaper, limit, blame_max, suspect_loss, claim_ms, score_ms, score_loss_max)    the last two: trajectories only
-- Take back jobs whose claim has expired: their worker died, froze or lost the broker.
-- Returns rows {what, id, fence, job}: 'ready' is waiting again · 'scoring' needs its reward asked for again ·
-- 'lost' is to blame for blame_max workers, 'unscored' for a loss of score_loss_max while its reward was computed: the
-- reaper must now give it up, with a reason, under the fence given here. So it must a job whose record is 'damaged'. To wait for a reward that nobody has begun
-- costs nothing.
-- keys shard.clock shard.counters jobs.bell jobs.deadline jobs.held jobs.job jobs.ready jobs.record
-- flags allow-oom
-- use batch parts count record claims look time ring suspect giving_up
local reaper, blame_max, suspect_loss, claim_ms = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms(shard.clock)
local may_count, count_from_ms = may_count_holds(now)
local answer, is_odd = {}, false -- whether a claim was found whose record does not say so

for _, id in ipairs(redis.call('ZRANGEBYSCORE', jobs.deadline, '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))) do
  local r = read_record(jobs.record, id)
  local what = 'ready'
  if r and r.state == 'scoring' and not ARGV[6] then r = nil end -- a turn has no reward
  local is_claim = r and is_job(id) and (r.state == 'claimed' or r.state == 'scoring')
  if not is_claim and not may_count then
    redis.call('ZADD', jobs.deadline, count_from_ms, id)
    what = nil
  elseif not r and is_job(id) and redis.call('HEXISTS', jobs.record, id) == 1 then
    -- a fence above all that it can have had: see first.lua
    r, what, is_odd = new_record(ARGV[6] and math.floor(now / 100) + 1000000 or now * 1000), 'damaged', true
    keep_to_give_up(id, r, reaper, now + claim_ms)
  elseif not is_claim then
    redis.call('ZREM', jobs.deadline, id)
    what, is_odd = nil, true
  elseif r.state == 'scoring' then
    if r.worker ~= '-' then -- it had begun, and fell silent
      r.loss, r.worker = r.loss + 1, '-'
      tally(shard.counters, 'rewards_lost', 1)
      write_record(jobs.record, id, r)
    end
    what = r.loss < tonumber(ARGV[7]) and 'scoring' or 'unscored'
    redis.call('ZADD', jobs.deadline, now + tonumber(ARGV[6]), id)
  else
    end_claim(jobs, id, r)
    local come, could_be_it = look_at(id, r)
    note_loss(r, come, could_be_it, suspect_loss)
    tally(shard.counters, 'reaped', 1)
    if r.blame < blame_max then
      r.state, r.worker = 'ready', '-'
      make_ready(jobs, {id}, true)
    else
      what = 'lost'
      keep_to_give_up(id, r, reaper, now + claim_ms)
    end
    write_record(jobs.record, id, r)
  end
  if what then answer[#answer + 1] = {what, id, r.fence, redis.call('HGET', jobs.job, id)} end
end
if is_odd then count_holds(now) end
return answer
