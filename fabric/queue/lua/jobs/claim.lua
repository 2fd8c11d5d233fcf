-- claim(worker, want, claim_ms, lease_epoch | '-', active_version, takes_suspect 0 | 1, inside 0 | 1, suspect_loss,
--   us_per_token, weights_epoch | '', hardware)
-- Give up to `want` ready jobs to a worker, each under a new fence, the most urgent first; one suspect at most, if it takes
-- any: others wait apart. `inside`: a world runs in the worker, and could end it. Of one class, turns that wait for this
-- worker come first; what is beyond its share, and what pays here, last. What has no record, or is not ready, is dropped.
-- Returns {0} no valid lease · {-1, head} weights too old, or of a publisher before · {1, wall_ms, next_ms | first_fence,
-- {id, fence, attempt, loss, job, log, entry_id | false}…}: turns of others may be taken next_ms from now, -1: never.
-- keys shard.begun shard.clock shard.lease_slots shard.leases shard.run jobs.deadline jobs.held jobs.job jobs.log
-- keys jobs.ready jobs.record jobs.suspects
-- flags allow-oom
-- use batch parts count record claimed look time limit suspect share homed strays ready first
local worker, want, class_count, is_turn, now, wall = ARGV[1], tonumber(ARGV[2]), 3, ARGV[4] ~= '-', now_ms(shard.clock)
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

local values, lines, of, taken, deadlines, with_log = fetch_all(jobs.record, ids), {}, {}, {}, {}, {}
for n, id in ipairs(ids) do
  local value = not of[id] and is_job(id) and values[n] -- one that is listed twice is taken once
  local line, fence, attempt, loss = claimed(value, worker, ARGV[7])
  if line and loss >= suspect_loss and not takes_suspect then
    redis.call('RPUSH', jobs.suspects, id)
  elseif line then
    takes_suspect = takes_suspect and loss < suspect_loss
    taken[#taken + 1], of[id] = id, {id, fence, attempt, loss}
    add_pair(lines, id, line)
    add_pair(deadlines, now + tonumber(ARGV[3]), id)
    if not is_turn or fence % FENCES_PER_CLAIM > 1 then with_log[#with_log + 1] = id end -- else nobody began it
  elseif value and not parse_record(value) then add_pair(deadlines, 0, id) end
end
call_in_parts('HSET', jobs.record, lines)
call_in_parts('ZADD', jobs.deadline, deadlines)
for n = 1, is_turn and 0 or #taken do redis.call('ZADD', shard.begun, 'NX', now, taken[n]) end
if #taken > 0 then tally(jobs.held, worker, #taken) end

local texts, logs, answer = fetch_all(jobs.job, taken), fetch_logs(jobs.log, with_log), {1, wall, next_ms}
if not is_turn then answer[3] = first_fence() end
for n, id in ipairs(taken) do
  answer[n + 3], of[id][5], of[id][6], of[id][7] = of[id], texts[n], logs[id] or {}, since[id] or false
end
return answer
