-- keep_scoring(duration_ms, worker, then per trajectory: id, fence)
-- Somebody sees to the reward of these trajectories: it is not asked for again until then. With a duration of 0 the
-- worker lets go of what it had begun, unharmed.
-- Returns per trajectory 1 extended · 0 it does not wait for its reward any more
-- keys shard.clock trajectory.deadline trajectory.record
-- flags allow-oom
-- use batch record look time
local until_ms, answer = now_ms(shard.clock) + tonumber(ARGV[1]), {}
for i = 3, #ARGV, 2 do
  local r = read_record(trajectory.record, ARGV[i])
  local waits = r and r.state == 'scoring' and r.fence == tonumber(ARGV[i + 1])
  if waits then redis.call('ZADD', trajectory.deadline, until_ms, ARGV[i]) end
  if waits and ARGV[1] == '0' and r.worker == ARGV[2] then
    r.worker = '-'
    write_record(trajectory.record, ARGV[i], r)
  end
  answer[#answer + 1] = waits and 1 or 0
end
return answer
