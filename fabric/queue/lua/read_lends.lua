-- read_lends(subject, …)
-- What serving teams said of these subjects, and the machine's time, which hours of the day are counted by.
--   KEYS[1] lends hash
-- Returns {wall_ms, {setting | false, …}}
-- flags allow-oom
local time = redis.call('TIME')
return {time[1] * 1000 + math.floor(time[2] / 1000), redis.call('HMGET', KEYS[1], unpack(ARGV))}
