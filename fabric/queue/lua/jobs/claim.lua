-- claim(worker, want, claim_ms, lease_epoch | '-', active_version, takes_suspect 0 | 1, inside 0 | 1, suspect_loss,
--   us_per_token, weights_epoch | '', hardware)
-- Give up to `want` ready jobs to a worker, each under a new fence, the most urgent first; one suspect at most, and none
-- unless it takes one: others wait apart. `inside`: a world runs in the worker, and could end it. Of one class, turns that
-- wait for this worker come first; what is beyond its share, and what pays here, last of all. What has no record, or is
-- not ready, is dropped; what cannot be read is the reaper's. Returns {0} no valid lease · {-1, head} weights too old, or
-- of a publisher before · {1, wall_ms, next_ms, {id, fence, attempt, loss, job, log, entry_id}…}: next_ms: when a turn of
-- others may be taken, or -1; of trajectories: their first fence; entry_id: when it was ready, by the machine; not of suspects.
-- keys shard.begun shard.clock shard.lease_slots shard.leases shard.run jobs.deadline jobs.held jobs.job jobs.log
-- keys jobs.ready jobs.record jobs.suspects
-- flags allow-oom
-- use batch parts count record look time limit suspect share homed strays ready first
local worker, want, claim_ms, class_count, is_turn = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), 3, ARGV[4] ~= '-'
local now, wall = now_ms(shard.clock)
local some_wait, room = is_turn and redis.call('ZRANGE', shard.turn_homed_at, 0, 0)[1], math.huge -- for their homes

if is_turn then
  local epoch, slots = lease_of(worker, now)
  if epoch ~= ARGV[4] then return {0} end
  local held = whole(redis.call('HGET', jobs.held, worker), 0)
  want = math.min(want, slots - held)
  if ARGV[9] ~= '0' then room = share_of(slots) - held end -- with prefix affinity
  local facts = redis.call('HMGET', shard.run, 'head_version', 'staleness', 'moved_by')
  local head, is_of_another = whole(facts[1], -1), ARGV[10] ~= '' and tonumber(ARGV[10]) < whole(facts[3], 0)
  if is_of_another or head - tonumber(ARGV[5]) > whole(facts[2], 0) then return {-1, head} end
elseif must_wait_for_consumer() then class_count = 1 end
local ids, since, next_ms, takes_suspect, suspect_loss = {}, {}, -1, ARGV[6] == '1', tonumber(ARGV[8])
if takes_suspect and want > 0 then ids[1] = next_suspect(jobs.suspects, jobs.record) end
local function strays(grace) return take_strays({worker, ARGV[9], ARGV[11]}, grace, want - #ids, now, wall - now, ids, since) end
if some_wait and want > #ids and is_overdue(some_wait, now) then strays(GRACE_MS) end
local own = some_wait and find_home(worker, math.min(want, room) - #ids) or {}
for class = 1, class_count do
  if own[1] then take_home(own, class, math.min(want, room) - #ids, wall - now, ids, since) end
  next_ms = sooner(next_ms, take_ready(jobs.ready[class], want - #ids, room - #ids, wall, ids, since))
end
if some_wait and want > #ids then next_ms = sooner(next_ms, strays(room > #ids and 0 or GRACE_MS)) end

local records, taken, deadlines, begun = read_records(jobs.record, ids), {}, {}, {}
for _, id in ipairs(ids) do
  local r = is_job(id) and records[id]
  if r and r.state == 'ready' and r.loss >= suspect_loss and not takes_suspect then
    redis.call('RPUSH', jobs.suspects, id)
  elseif r and r.state == 'ready' then
    takes_suspect = takes_suspect and r.loss < suspect_loss
    r.state, r.fence, r.worker, r.inside = 'claimed', r.fence + 1, worker, tonumber(ARGV[7])
    taken[#taken + 1] = id
    add_pair(deadlines, now + claim_ms, id)
    if not is_turn then add_pair(begun, now, id) end
  elseif not r and is_job(id) and redis.call('HEXISTS', jobs.record, id) == 1 then add_pair(deadlines, 0, id) end
end
write_records(jobs.record, taken, records)
call_in_parts('ZADD', jobs.deadline, deadlines)
for n = 1, #begun, 2 do redis.call('ZADD', shard.begun, 'NX', begun[n], begun[n + 1]) end
if #taken > 0 then tally(jobs.held, worker, #taken) end

local answer, texts, logs = {1, wall, is_turn and next_ms or first_fence()}, fetch_all(jobs.job, taken), fetch_logs(jobs.log, taken)
for n, id in ipairs(taken) do
  answer[n + 3] = {id, records[id].fence, records[id].attempt, records[id].loss, texts[n], logs[n], since[id] or false}
end
return answer
