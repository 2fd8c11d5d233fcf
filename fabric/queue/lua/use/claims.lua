-- Ending claims: what a worker holds is counted, and a claim has a deadline. Needs batch.lua and count.lua before it.
-- `kind` = the keys of trajectories or of turns.
local function hold_less(held, worker, count)
  if tally(held, worker, -count) <= 0 then redis.call('HDEL', held, worker) end
end

-- End the claim that a record describes: no deadline (a trajectory that waits for its reward has one too), one less held.
local function end_claim(kind, id, r)
  redis.call('ZREM', kind.deadline, id)
  if r and r.state == 'claimed' then hold_less(kind.held, r.worker, 1) end
end

-- End claims of one worker.
local function end_claims(kind, ids, worker)
  if #ids == 0 then return end
  call_in_parts('ZREM', kind.deadline, ids)
  hold_less(kind.held, worker, #ids)
end
