-- claim(worker, want, claim_ms, lease_epoch | '-', active_version)
-- Give up to `want` ready jobs to a worker, each under a new fence.
--   KEYS[1] ready stream   KEYS[2] job hash     KEYS[3] record hash   KEYS[4] deadline zset
--   KEYS[5] held hash      KEYS[6] log hash     KEYS[7] leases hash   KEYS[8] run hash
-- Returns {1, {id, fence, attempt, loss, job, log}…} · {0} no valid lease · {-1, head_version} weights too old
-- Jobs whose record is gone or not ready (cancelled, settled meanwhile) are dropped from the stream here.
-- use batch record time
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
if not read then return {1} end
local entries, ids = {}, {}
for n, entry in ipairs(read[1][2]) do entries[n], ids[n] = entry[1], entry[2][2] end
call_in_parts('XDEL', KEYS[1], entries)

local records = read_records(KEYS[3], ids)
local taken, deadlines = {}, {}
for _, id in ipairs(ids) do
  local r = records[id]
  if r and r.state == 'ready' then
    r.state, r.fence, r.worker = 'claimed', r.fence + 1, worker
    taken[#taken + 1] = id
    add_pair(deadlines, now + claim_ms, id)
  end
end
write_records(KEYS[3], taken, records)
call_in_parts('ZADD', KEYS[4], deadlines)
if #taken > 0 then redis.call('HINCRBY', KEYS[5], worker, #taken) end

local answer, jobs, logs = {1}, fetch_all(KEYS[2], taken), fetch_all(KEYS[6], taken)
for n, id in ipairs(taken) do
  local r = records[id]
  answer[n + 1] = {id, r.fence, r.attempt, r.loss, jobs[n], logs[n]}
end
return answer
