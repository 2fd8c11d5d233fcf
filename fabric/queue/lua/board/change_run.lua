-- change_run(run_id, config as it was | '', config)
-- Change the settings of a run, unless somebody has changed them since they were read, or has deleted the run; or make
-- one, if there is none.
-- Returns 1 changed · 0 they are others by now
-- keys fabric.RUNS
-- flags allow-oom
if (redis.call('HGET', fabric.RUNS, ARGV[1]) or '') ~= ARGV[2] then return 0 end
redis.call('HSET', fabric.RUNS, ARGV[1], ARGV[3])
return 1
