-- set_sharing(worker, report)
-- Keep what a serving worker measured; not of one that is not on the board, for nobody would take it away.
--   KEYS[1] workers hash   KEYS[2] sharing hash
-- flags allow-oom
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
return 1
