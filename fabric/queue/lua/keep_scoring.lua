-- keep_scoring(duration_ms, worker, then per trajectory: id, fence)
-- Somebody sees to the reward of these trajectories: it is not asked for again until then. With a duration of 0 the
-- worker lets go of what it had begun, unharmed.
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] clock
-- Returns per trajectory 1 extended · 0 it does not wait for its reward any more
-- flags allow-oom
-- use batch record look time
local until_ms, answer = now_ms(KEYS[3]) + tonumber(ARGV[1]), {}
for i = 3, #ARGV, 2 do
  local r = read_record(KEYS[1], ARGV[i])
  local waits = r and r.state == 'scoring' and r.fence == tonumber(ARGV[i + 1])
  if waits then redis.call('ZADD', KEYS[2], until_ms, ARGV[i]) end
  if waits and ARGV[1] == '0' and r.worker == ARGV[2] then
    r.worker = '-'
    write_record(KEYS[1], ARGV[i], r)
  end
  answer[#answer + 1] = waits and 1 or 0
end
return answer
