-- settle_trajectory(id, fence, group_id, state, rollout, score_ms, worker, oldest_version, reward | '', token_count)
-- End a trajectory exactly once: `completed`, or `scoring` while its reward is being computed (then score_ms is how
-- soon it must be asked for). `worker` holds the claim; it is '' when a trajectory that waits for its reward gets it.
-- Its loss is 0 again: agents that it cost are no losses of its reward, and those cost no agent of another attempt.
--   KEYS[1..19] see queue/lua/use/drop.lua   KEYS[20] clock   KEYS[21] rewards hash (a complete one is counted there, once)
-- Returns 1 settled (also when asked again) · 0 the fence is stale · {2, head_version} its tokens are (nothing written)
-- flags allow-oom
-- use batch count record hold look time suspect forget_turns drop close curve
local id, fence, group_id, state = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local r = read_record(KEYS[1], id)
if r and r.fence == fence and r.state == state then return 1 end
local is_ours = r and r.fence == fence
  and (r.state == 'scoring' and ARGV[7] == '' or r.state == 'claimed' and r.worker == ARGV[7])
if not is_ours then
  tally(KEYS[16], 'refused', 1)
  return 0
end
local facts, oldest = redis.call('HMGET', KEYS[17], 'head_version', 'staleness', 'when_stale'), tonumber(ARGV[8])
local head = whole(facts[1], -1)
if facts[3] == 'rerun' and oldest >= 0 and head - oldest > whole(facts[2], 0) then
  return {2, head}
end
end_claim(KEYS[2], KEYS[3], id, r)
weigh(#ARGV[5] - redis.call('HSTRLEN', KEYS[14], id))
redis.call('HSET', KEYS[14], id, ARGV[5])
forget_turns(TURN_KEYS, id)
redis.call('HDEL', KEYS[5], id)
clear(r)
r.state, r.worker = state, '-'
write_record(KEYS[1], id, r)
if state == 'scoring' then
  redis.call('ZADD', KEYS[2], now_ms(KEYS[20]) + tonumber(ARGV[6]), id)
else
  if ARGV[9] ~= '' then note_reward(KEYS[21], oldest, tonumber(ARGV[9]), tonumber(ARGV[10])) end
  close(group_id, 'completed')
end
return 1
