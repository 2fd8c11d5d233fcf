-- settle_trajectory(id, fence, group_id, state, rollout, score_ms)
-- End a trajectory exactly once: `completed`, or `scoring` while its reward is being computed.
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] held hash   KEYS[4] job hash   KEYS[5] log hash
--   KEYS[6..12] turns: record, deadline, held, job, log, agent, result      (deleted)
--   KEYS[13] group hash   KEYS[14] rollouts hash   KEYS[15] completed stream   KEYS[16] counters
-- Returns 1 settled (also when asked again) · 0 the fence is stale (nothing written)
-- use batch record time forget_turns close
local id, fence, group_id, state = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local r = read_record(KEYS[1], id)
if r and r.fence == fence and r.state == state then return 1 end
if not r or r.fence ~= fence or (r.state ~= 'claimed' and r.state ~= 'scoring') then
  redis.call('HINCRBY', KEYS[16], 'refused', 1)
  return 0
end
end_claim(KEYS[2], KEYS[3], id, r)
redis.call('HSET', KEYS[14], id, ARGV[5])
forget_turns({KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]}, id)
redis.call('HDEL', KEYS[5], id)
r.state = state
write_record(KEYS[1], id, r)
if state == 'scoring' then
  redis.call('ZADD', KEYS[2], now_ms() + tonumber(ARGV[6]), id)
  return 1
end
redis.call('HDEL', KEYS[4], id)
close(KEYS[13], KEYS[15], KEYS[16], group_id, 'completed')
return 1
