-- claim(worker, want, claim_ms, lease_epoch | '-', active_version)
-- Give up to `want` ready jobs to a worker, each under a new fence.
--   KEYS[1] ready stream   KEYS[2] job hash     KEYS[3] record hash   KEYS[4] deadline zset
--   KEYS[5] held hash      KEYS[6] log hash     KEYS[7] leases hash   KEYS[8] run hash
-- Returns {1, {id, fence, attempt, loss, job, log}…} · {0} no valid lease · {-1, head_version} weights too old
-- Jobs whose record is gone or not ready (cancelled, settled meanwhile) are dropped from the stream here.
-- use record
local worker, want, claim_ms = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local now = now_ms()

if ARGV[4] ~= '-' then
  local lease = redis.call('HGET', KEYS[7], worker)
  if not lease then return {0} end
  local epoch, slots, until_ms = string.match(lease, '^(%d+) (%d+) (%d+)$')
  if epoch ~= ARGV[4] or (until_ms ~= '0' and tonumber(until_ms) <= now) then return {0} end
  want = math.min(want, tonumber(slots) - tonumber(redis.call('HGET', KEYS[5], worker) or 0))
  local facts = redis.call('HMGET', KEYS[8], 'head_version', 'staleness')
  if tonumber(facts[1]) - tonumber(ARGV[5]) > tonumber(facts[2]) then return {-1, tonumber(facts[1])} end
end
if want <= 0 then return {1} end

local read = redis.call('XREADGROUP', 'GROUP', 'workers', 'fabric', 'COUNT', want, 'NOACK', 'STREAMS', KEYS[1], '>')
local answer = {1}
if not read then return answer end
for _, entry in ipairs(read[1][2]) do
  local id = entry[2][2]
  redis.call('XDEL', KEYS[1], entry[1])
  local r = read_record(KEYS[3], id)
  if r and r.state == 'ready' then
    r.state, r.fence, r.worker = 'claimed', r.fence + 1, worker
    write_record(KEYS[3], id, r)
    redis.call('ZADD', KEYS[4], now + claim_ms, id)
    redis.call('HINCRBY', KEYS[5], worker, 1)
    answer[#answer + 1] = {id, r.fence, r.attempt, r.loss, redis.call('HGET', KEYS[2], id), redis.call('HGET', KEYS[6], id)}
  end
end
return answer
