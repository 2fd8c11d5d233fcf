-- release(worker, blame_max | 0, then per job: id, fence, log | '')
-- Give claimed jobs back, with what they have made so far. Being revoked is no failure: attempt and loss stay.
-- With a blame_max they stalled, for which they are to blame; the last one's claim is left to the reaper as expired.
-- Returns per job 1 given back · 0 the claim was lost already (nothing written)
-- keys shard.counters jobs.bell jobs.deadline jobs.held jobs.log jobs.ready jobs.record
-- flags allow-oom
-- use batch parts count record claims ring suspect
local worker, blame_max = ARGV[1], tonumber(ARGV[2])
local answer, back, saved, logs, lines = {}, {}, {}, {}, {}
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  local value = redis.call('HGET', jobs.record, id)
  local r = is_held(value, ARGV[i + 1], worker) and parse_record(value)
  if r then
    if ARGV[i + 2] ~= '' then
      add_pair(logs, id, ARGV[i + 2])
      saved[#saved + 1] = id
    end
    local come = ARGV[i + 2] ~= '' and #ARGV[i + 2] or log_size(jobs.log, id)
    if blame_max > 0 then note_stall(r, come) end
    if blame_max > 0 and r.blame >= blame_max then
      redis.call('ZADD', jobs.deadline, 0, id)
      add_pair(lines, id, format_record(r))
    else
      end_claim(jobs, id, r)
      r.state, r.worker = 'ready', '-'
      add_pair(lines, id, format_record(r))
      back[#back + 1] = id
    end
  end
  answer[#answer + 1] = r and 1 or 0
end
call_in_parts('HSET', jobs.record, lines)
forget_logs(jobs.log, saved)
call_in_parts('HSET', jobs.log, logs)
make_ready(jobs, back, true)
if #back > 0 then tally(shard.counters, blame_max > 0 and 'stalled' or 'released', #back) end
return answer
