-- read_lends(subject, …)
-- What serving teams said of these subjects, and the machine's time, which hours of the day are counted by.
-- Returns {wall_ms, {setting | false, …}}
-- keys fabric.lends
-- flags allow-oom
local time = redis.call('TIME')
return {time[1] * 1000 + math.floor(time[2] / 1000), redis.call('HMGET', fabric.lends, unpack(ARGV))}
