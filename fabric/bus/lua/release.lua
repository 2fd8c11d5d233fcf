-- release(worker, then per job: id, fence, log | '')
-- Give claimed jobs back, with what they have made so far. Being revoked is no failure: attempt and loss stay.
--   KEYS[1] ready stream   KEYS[2] bell   KEYS[3] record hash   KEYS[4] deadline zset   KEYS[5] held hash
--   KEYS[6] log hash       KEYS[7] counters
-- Returns per job 1 given back · 0 the claim was lost already (nothing written)
-- use batch record ring
local worker = ARGV[1]
local answer = {}
for i = 2, #ARGV, 3 do
  local id = ARGV[i]
  local value = redis.call('HGET', KEYS[3], id)
  local kept = is_held(value, ARGV[i + 1], worker)
  if kept then
    local r = parse_record(value)
    end_claim(KEYS[4], KEYS[5], id, r)
    r.state, r.worker = 'ready', '-'
    write_record(KEYS[3], id, r)
    if ARGV[i + 2] ~= '' then redis.call('HSET', KEYS[6], id, ARGV[i + 2]) end
    make_ready(KEYS[1], KEYS[2], {id})
    redis.call('HINCRBY', KEYS[7], 'released', 1)
  end
  answer[#answer + 1] = kept and 1 or 0
end
return answer
