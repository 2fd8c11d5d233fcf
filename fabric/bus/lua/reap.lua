-- reap(reaper, limit, loss_max, claim_ms, score_ms, score_count_max)      the last two: trajectories only
-- Take back jobs whose claim has expired: their worker died, froze or lost the broker.
--   KEYS[1] ready stream   KEYS[2] bell   KEYS[3] record hash   KEYS[4] deadline zset   KEYS[5] held hash
--   KEYS[6] job hash       KEYS[7] counters
-- Returns rows {what, id, fence, job}: 'ready' is waiting again · 'scoring' needs its reward asked for again ·
-- 'lost' has cost loss_max workers, 'unscored' was asked for score_count_max times: the reaper must now give it up,
-- with a reason, under the fence given here.
-- use batch record time ring
local reaper, loss_max, claim_ms = ARGV[1], tonumber(ARGV[3]), tonumber(ARGV[4])
local now = now_ms()
local answer = {}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[4], '-inf', now, 'LIMIT', 0, tonumber(ARGV[2]))) do
  local r = read_record(KEYS[3], id)
  local what = 'ready'
  if not r or (r.state ~= 'claimed' and r.state ~= 'scoring') then
    redis.call('ZREM', KEYS[4], id)
    what = nil
  elseif r.state == 'scoring' then
    r.loss = r.loss + 1
    what = r.loss < tonumber(ARGV[6]) and 'scoring' or 'unscored'
    redis.call('ZADD', KEYS[4], now + tonumber(ARGV[5]), id)
    write_record(KEYS[3], id, r)
  else
    end_claim(KEYS[4], KEYS[5], id, r)
    r.loss = r.loss + 1
    redis.call('HINCRBY', KEYS[7], 'reaped', 1)
    if r.loss < loss_max then
      r.state, r.worker = 'ready', '-'
      make_ready(KEYS[1], KEYS[2], {id})
    else
      what = 'lost'
      r.fence, r.worker = r.fence + 1, reaper
      redis.call('ZADD', KEYS[4], now + claim_ms, id)
      redis.call('HINCRBY', KEYS[5], reaper, 1)
    end
    write_record(KEYS[3], id, r)
  end
  if what then answer[#answer + 1] = {what, id, r.fence, redis.call('HGET', KEYS[6], id)} end
end
return answer
