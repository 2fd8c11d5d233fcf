-- set_sharing(worker, report)
-- Keep what a serving worker measured; not of one that is not on the board, for nobody would take it away.
-- keys fabric.sharing fabric.workers
-- flags allow-oom
if redis.call('HEXISTS', fabric.workers, ARGV[1]) == 0 then return 0 end
redis.call('HSET', fabric.sharing, ARGV[1], ARGV[2])
return 1
