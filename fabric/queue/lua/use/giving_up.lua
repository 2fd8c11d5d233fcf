-- What reap does to a job; KEYS and ARGV are reap's.
-- How far a job has come, and whether its worker was at it: a trajectory whose turn is under way only waits.
local function look_at(id, r)
  if not ARGV[6] then return redis.call('HSTRLEN', KEYS[12], id), true end
  local come, state = r.seen, 'settled'
  while state == 'settled' do
    local turn = redis.call('HGET', KEYS[12], id .. '.' .. come)
    state = turn and string.match(turn, '^%S+') or nil
    if state == 'settled' then come = come + 1 end
  end
  return come, r.inside == 1 and state == nil
end

-- The reaper holds it from here on, and gives it up.
local function keep_to_give_up(id, r, reaper, until_ms)
  r.state, r.fence, r.worker = 'claimed', r.fence + 1, reaper
  redis.call('ZADD', KEYS[7], until_ms, id)
  tally(KEYS[8], reaper, 1)
  write_record(KEYS[6], id, r)
end
