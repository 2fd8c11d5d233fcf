-- lead(controller, duration_ms)
-- Become or stay the one controller that publishes leases. A new leader gets a higher term; leases are numbered from it.
--   KEYS[1] leader string "controller term until_ms"   KEYS[2] lease_epoch counter (terms)   KEYS[3] clock
-- Returns the term while this controller leads · 0 another one leads
-- flags allow-oom
-- use look time
local now, leader, term = now_ms(KEYS[3]), redis.call('GET', KEYS[1]), nil
if leader then
  local name, led, until_ms = string.match(leader, '^(%S+) (%d+) (%d+)$')
  if tonumber(until_ms) > now then
    if name ~= ARGV[1] then return 0 end
    term = led
  end
end
term = term or redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], string.format('%s %d %d', ARGV[1], term, now + tonumber(ARGV[2])))
return tonumber(term)
