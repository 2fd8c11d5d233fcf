-- set_leases(term, read_costs | '', then per change: worker, lease_epoch, slot_count, duration_ms | 0, remove)
-- Publish, extend, shrink or end leases on one shard. Nobody of an older term writes any more once a newer one has
-- (also without a change, which only says that the term has begun), and an older epoch never overwrites a newer one.
-- Counts the slots of all leases, for those who share out turns. read_costs: where the run's workers are of unlike
-- hardware, what reading a token costs more on each kind (rules/lending/hardware.py), lines "cost<tab>kind"; "-": they are
-- alike, as they are taken to be when a term begins.
-- Returns per change 2 it is another lease now · 1 the same, extended · -1 a newer term or lease is in place
-- keys shard.clock shard.lease_slots shard.lease_term shard.leases shard.turn_hardware
-- flags allow-oom
-- use count term look time batch
local term, now = tonumber(ARGV[1]), now_ms(shard.clock, true)
local last = read_term(shard.lease_term)
if term > last then redis.call('SET', shard.lease_term, ARGV[1]) end
if term > last or term == last and ARGV[2] == '-' then redis.call('DEL', shard.turn_hardware) end
for cost, kind in string.gmatch(term >= last and ARGV[2] or '', '(%-?%d+)\t([^\n]*)\n') do
  redis.call('HSET', shard.turn_hardware, kind, cost)
end

local workers, answer, written, removed = {}, {}, {}, {}
for i = 3, #ARGV, 5 do workers[#workers + 1] = ARGV[i] end
local held = fetch_all(shard.leases, workers)
for n, worker in ipairs(workers) do
  local i = 5 * n - 2
  local epoch = tonumber(ARGV[i + 1])
  local held_epoch = whole(held[n] and string.match(held[n], '^(%d+) '), -1)
  answer[n] = held_epoch == epoch and 1 or 2
  if term < last or held_epoch > epoch then
    answer[n] = -1
  elseif ARGV[i + 4] == '1' then
    answer[n] = 2
    removed[#removed + 1] = worker
  else
    local until_ms = ARGV[i + 3] == '0' and 0 or now + tonumber(ARGV[i + 3])
    add_pair(written, worker, string.format('%s %s %d', ARGV[i + 1], ARGV[i + 2], until_ms))
  end
end
call_in_parts('HSET', shard.leases, written)
call_in_parts('HDEL', shard.leases, removed)
local slot_total = 0
for _, lease in ipairs(redis.call('HVALS', shard.leases)) do
  slot_total = slot_total + whole(string.match(lease, '^%d+ (%d+) '), 0)
end
redis.call('SET', shard.lease_slots, slot_total)
return answer
