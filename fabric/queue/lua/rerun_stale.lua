-- rerun_stale(group_id, entry_id, consumer, is_again, rerun_count_max, then per trajectory: id, dead_letter)
-- Rollouts of a complete group are too stale to be delivered: take the group back, and run them again.
-- Its deadline holds again, also one that has passed: then whoever reaps next completes it with what it has.
-- A group that somebody may have used already (is_again) says so when it comes the next time.
--   KEYS[1..19] see queue/lua/use/drop.lua   KEYS[20..22] ready streams   KEYS[23] bell   KEYS[24] dead hash
-- Returns 1 the group is open again · 0 it is gone, was taken back before, or another consumer holds it (nothing written)
-- flags allow-oom
-- use batch count record hold holder ring forget_turns drop close
local group_id = ARGV[1]
if redis.call('HGET', KEYS[13], 'state') ~= 'complete' or not may_end(KEYS[15], ARGV[2], ARGV[3]) then return 0 end
redis.call('XACK', KEYS[15], 'trainer', ARGV[2])
redis.call('XDEL', KEYS[15], ARGV[2])
redis.call('HSET', KEYS[13], 'state', 'open')
if ARGV[4] == '1' then redis.call('HSET', KEYS[13], 'redelivered', 1) end
tally(KEYS[16], 'groups_completed', -1)
local again, dead = {}, {}
for i = 6, #ARGV, 2 do
  local id = ARGV[i]
  local r = read_record(KEYS[1], id)
  if r and r.state == 'completed' then
    forget_rollout(id)
    tally(KEYS[13], 'completed', -1)
    tally(KEYS[16], 'trajectories_completed', -1)
    r.worker = '-'
    r.state = spend_attempt(r, 0, tonumber(ARGV[5])) and 'ready' or 'failed'
    write_record(KEYS[1], id, r)
    if r.state == 'ready' then again[#again + 1] = id else add_pair(dead, id, ARGV[i + 1]) end
  end
end
local g = redis.call('HMGET', KEYS[13], 'quorum', 'priority', 'completed', 'deadline')
redis.call('HSET', KEYS[18], group_id, string.format('%s %d %s', g[2], g[1] - g[3], g[1]))
if g[4] then redis.call('ZADD', KEYS[19], g[4], group_id) end
make_ready({KEYS[20], KEYS[21], KEYS[22]}, KEYS[23], KEYS[18], again, true)
call_in_parts('HSET', KEYS[24], dead)
for _ = 1, #dead / 2 do
  if redis.call('HGET', KEYS[13], 'state') == 'open' then close(group_id, 'failed') end
end
return 1
