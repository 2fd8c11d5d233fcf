-- release(worker, blame_max | 0, then per job: id, fence, log | '')
-- Give claimed jobs back, with what they have made so far. Being revoked is no failure: attempt and loss stay.
-- With a blame_max they stalled, for which they are to blame; the last one's claim is left to the reaper as expired.
--   KEYS[1..3] ready streams   KEYS[4] bell   KEYS[5] open hash   KEYS[6] record hash   KEYS[7] deadline zset
--   KEYS[8] held hash          KEYS[9] log hash   KEYS[10] counters
-- Returns per job 1 given back · 0 the claim was lost already (nothing written)
-- flags allow-oom
-- use batch count record hold ring suspect
local worker, blame_max = ARGV[1], tonumber(ARGV[2])
local answer, back, logs, lines = {}, {}, {}, {}
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  local value = redis.call('HGET', KEYS[6], id)
  local r = is_held(value, ARGV[i + 1], worker) and parse_record(value)
  if r then
    if ARGV[i + 2] ~= '' then add_pair(logs, id, ARGV[i + 2]) end
    local come = ARGV[i + 2] ~= '' and #ARGV[i + 2] or redis.call('HSTRLEN', KEYS[9], id)
    if blame_max > 0 then note_stall(r, come) end
    if blame_max > 0 and r.blame >= blame_max then
      redis.call('ZADD', KEYS[7], 0, id)
      add_pair(lines, id, format_record(r))
    else
      end_claim(KEYS[7], KEYS[8], id, r)
      r.state, r.worker = 'ready', '-'
      add_pair(lines, id, format_record(r))
      back[#back + 1] = id
    end
  end
  answer[#answer + 1] = r and 1 or 0
end
call_in_parts('HSET', KEYS[6], lines)
call_in_parts('HSET', KEYS[9], logs)
make_ready({KEYS[1], KEYS[2], KEYS[3]}, KEYS[4], KEYS[5], back, true)
if #back > 0 then tally(KEYS[10], blame_max > 0 and 'stalled' or 'released', #back) end
return answer
