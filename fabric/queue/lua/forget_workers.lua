-- forget_workers(term, workers…)
-- Take silent workers off the board; not for a leader that was replaced.
--   KEYS[1] workers hash   KEYS[2] heartbeats zset   KEYS[3] assignments hash   KEYS[4] sharing hash
--   KEYS[5] lease_epoch: the highest term
-- Returns 1 done · 0 a newer term has begun (nothing written)
-- flags allow-oom
-- use batch count term
local term = table.remove(ARGV, 1)
if read_term(KEYS[5]) > tonumber(term) then return 0 end
call_in_parts('ZREM', KEYS[2], ARGV)
for _, key in ipairs({KEYS[1], KEYS[3], KEYS[4]}) do call_in_parts('HDEL', key, ARGV) end
return 1
