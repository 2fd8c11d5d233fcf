-- delete_run(run_id, ttl_ms)
-- Take a run off the list of runs, and say for a while that it was deleted. Who calls it removes the run's keys.
-- Returns 1 deleted · 0 there is no such run
-- keys fabric.RUNS deleted
-- flags allow-oom
if redis.call('HDEL', fabric.RUNS, ARGV[1]) == 0 then return 0 end
redis.call('SET', deleted, '', 'PX', ARGV[2])
return 1
