-- forget_workers(term, workers…)
-- Take silent workers off the board; not for a leader that was replaced.
-- Returns 1 done · 0 a newer term has begun (nothing written)
-- keys fabric.assignments fabric.heartbeats fabric.lease_epoch fabric.sharing fabric.workers
-- flags allow-oom
-- use batch count term
local term = table.remove(ARGV, 1)
if read_term(fabric.lease_epoch) > tonumber(term) then return 0 end
call_in_parts('ZREM', fabric.heartbeats, ARGV)
for _, key in ipairs({fabric.workers, fabric.assignments, fabric.sharing}) do call_in_parts('HDEL', key, ARGV) end
return 1
