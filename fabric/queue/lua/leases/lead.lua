-- lead(controller, process, duration_ms, is_new)
-- Become or stay the one process that publishes leases. A new leader gets a higher term; leases are numbered from it.
-- A process that is new replaces one of its controller's name at once: mostly its dead predecessor. One that lives leads
-- no more: no two processes share a term.
-- Terms are at least the machine's seconds since TERM_FROM_S: a broker that lost its last writes in a fail-over would
-- otherwise give a term out twice, to the leader of before and to its successor.
-- Returns the term while this process leads · 0 another one leads
-- keys fabric.clock fabric.leader fabric.lease_epoch
-- flags allow-oom
-- use count term look time
local TERM_FROM_S = 1700000000
local now, leader, last, term = now_ms(fabric.clock, true), redis.call('GET', fabric.leader), read_term(fabric.lease_epoch), nil
if leader then
  local name, process, led, until_ms = string.match(leader, '^([^%s/]+)/?(%S*) (%d+) (%d+)$')
  if whole(until_ms, 0) > now then
    local is_new = ARGV[4] == '1'
    if name ~= ARGV[1] or (process ~= ARGV[2] and not is_new) then return 0 end
    if not is_new and whole(led, 0) >= last then term = whole(led) end
  end
end
if not term then term = math.max(last + 1, redis.call('TIME')[1] - TERM_FROM_S) end
if last < term then redis.call('SET', fabric.lease_epoch, string.format('%d', term)) end
redis.call('SET', fabric.leader, string.format('%s/%s %d %d', ARGV[1], ARGV[2], term, now + tonumber(ARGV[3])))
return term
