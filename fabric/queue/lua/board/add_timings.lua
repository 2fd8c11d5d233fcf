-- add_timings(report, ttl_ms, count, then per number: field, by; then per latest one: field, "seconds trajectory_id")
-- Add what a role has measured since its last report to its run's histograms. A report that comes again counts once.
-- Twin: rules/queue/timings.py, which says what the fields are.
-- Returns 1 added · 0 it was before, or there is no such run (nothing written)
-- keys shard.run shard.timings told
-- flags allow-oom
-- use count
if redis.call('EXISTS', shard.run) == 0 or redis.call('GET', told) == ARGV[1] then return 0 end
local last = 3 + 2 * tonumber(ARGV[3])
for i = 4, last, 2 do tally(shard.timings, ARGV[i], ARGV[i + 1]) end
local time = redis.call('TIME')
local wall = string.format('%d', time[1] * 1000 + math.floor(time[2] / 1000))
for i = last + 1, #ARGV, 2 do redis.call('HSET', shard.timings, ARGV[i], wall .. ' ' .. ARGV[i + 1]) end
redis.call('SET', told, ARGV[1], 'PX', ARGV[2])
return 1
