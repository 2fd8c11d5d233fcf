-- reap(reaper, limit, blame_max, suspect_loss, claim_ms, score_ms, score_loss_max)    the last two: trajectories only
-- Take back jobs whose claim has expired: their worker died, froze or lost the broker.
--   KEYS[1..3] ready streams   KEYS[4] bell   KEYS[5] open hash   KEYS[6] record hash   KEYS[7] deadline zset
--   KEYS[8] held hash          KEYS[9] job hash   KEYS[10] counters   KEYS[11] clock
--   KEYS[12] turn record hash (trajectories) or log hash (turns): how far a job has come
-- Returns rows {what, id, fence, job}: 'ready' is waiting again · 'scoring' needs its reward asked for again ·
-- 'lost' is to blame for blame_max workers, 'unscored' for a loss of score_loss_max while its reward was computed: the
-- reaper must now give it up, with a reason, under the fence given here. So it must a job whose record is 'damaged'. To wait for a reward that nobody has begun
-- costs nothing.
-- flags allow-oom
-- use batch count record hold look time ring suspect giving_up
local reaper, blame_max, suspect_loss, claim_ms = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now = now_ms(KEYS[11])
local answer, is_odd = {}, false -- whether a claim was found whose record does not say so

for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[7], '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))) do
  local r = read_record(KEYS[6], id)
  local what = 'ready'
  if r and r.state == 'scoring' and not ARGV[6] then r = nil end -- a turn has no reward
  if not r and is_job(id) and redis.call('HEXISTS', KEYS[6], id) == 1 then
    -- a fence above all that it can have had
    r, what, is_odd = new_record(ARGV[6] and math.floor(now / 1000) or now * 100), 'damaged', true
    keep_to_give_up(id, r, reaper, now + claim_ms)
  elseif not r or not is_job(id) or (r.state ~= 'claimed' and r.state ~= 'scoring') then
    redis.call('ZREM', KEYS[7], id)
    what, is_odd = nil, true
  elseif r.state == 'scoring' then
    if r.worker ~= '-' then -- it had begun, and fell silent
      r.loss, r.worker = r.loss + 1, '-'
      tally(KEYS[10], 'rewards_lost', 1)
      write_record(KEYS[6], id, r)
    end
    what = r.loss < tonumber(ARGV[7]) and 'scoring' or 'unscored'
    redis.call('ZADD', KEYS[7], now + tonumber(ARGV[6]), id)
  else
    end_claim(KEYS[7], KEYS[8], id, r)
    local come, could_be_it = look_at(id, r)
    note_loss(r, come, could_be_it, suspect_loss)
    tally(KEYS[10], 'reaped', 1)
    if r.blame < blame_max then
      r.state, r.worker = 'ready', '-'
      make_ready({KEYS[1], KEYS[2], KEYS[3]}, KEYS[4], KEYS[5], {id}, true)
    else
      what = 'lost'
      keep_to_give_up(id, r, reaper, now + claim_ms)
    end
    write_record(KEYS[6], id, r)
  end
  if what then answer[#answer + 1] = {what, id, r.fence, redis.call('HGET', KEYS[9], id)} end
end
if is_odd then count_holds() end
return answer
