-- lead(controller, duration_ms)
-- Become or stay the one controller that publishes leases. A new leader gets a higher term; leases are numbered from it.
--   KEYS[1] leader string "controller term", expires   KEYS[2] lease_epoch counter (terms)
-- Returns the term while this controller leads · 0 another one leads
local leader = redis.call('GET', KEYS[1])
local term
if leader then
  local name
  name, term = string.match(leader, '^(%S+) (%d+)$')
  if name ~= ARGV[1] then return 0 end
else
  term = redis.call('INCR', KEYS[2])
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. term, 'PX', ARGV[2])
return tonumber(term)
