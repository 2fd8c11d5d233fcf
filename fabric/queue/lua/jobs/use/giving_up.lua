-- What reap does to a job; ARGV is reap's. Needs parts.lua before it.
-- keys turn.record jobs.deadline jobs.held jobs.log jobs.record
-- How far a job has come, and whether its worker was at it: a trajectory whose turn is under way only waits.
local function look_at(id, r)
  if not ARGV[6] then return log_size(jobs.log, id), true end
  local come, state = r.seen, 'settled'
  while state == 'settled' do
    local row = redis.call('HGET', turn.record, id .. '.' .. come)
    state = row and string.match(row, '^%S+') or nil
    if state == 'settled' then come = come + 1 end
  end
  return come, r.inside == 1 and state == nil
end

-- The reaper holds it from here on, and gives it up.
local function keep_to_give_up(id, r, reaper, until_ms)
  r.state, r.fence, r.worker = 'claimed', r.fence + 1, reaper
  redis.call('ZADD', jobs.deadline, until_ms, id)
  tally(jobs.held, reaper, 1)
  write_record(jobs.record, id, r)
end

-- Whether what workers hold may be counted anew, and from when on. To count costs some 20 us a claim, so each claim puts
-- the next time off by a millisecond: who writes over records all the time costs the broker no more than a few percent.
-- The field '-' of `held`, which no worker is called, keeps the time.
local function may_count_holds(now)
  local from_ms = whole(redis.call('HGET', jobs.held, '-'), 0) + redis.call('ZCARD', jobs.deadline)
  return now >= from_ms, from_ms
end

-- Count anew what each worker holds. A claim whose record somebody wrote over would take a slot of its worker for good.
local function count_holds(now)
  local ids, counts, lines = redis.call('ZRANGE', jobs.deadline, 0, -1), {}, {'-', now}
  local records = read_records(jobs.record, ids)
  for _, id in ipairs(ids) do
    local r = records[id]
    if r and r.state == 'claimed' then counts[r.worker] = (counts[r.worker] or 0) + 1 end
  end
  for worker, count in pairs(counts) do add_pair(lines, worker, count) end
  redis.call('DEL', jobs.held)
  call_in_parts('HSET', jobs.held, lines)
end
