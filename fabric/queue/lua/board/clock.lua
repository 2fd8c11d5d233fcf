-- clock()
-- What a shard's clock shows, and the machine's own; neither is set, so those who only read may ask.
-- Returns {now_ms, wall_ms}
-- keys clock
-- flags allow-oom
-- use look
local wall, now = look(clock)
return {now, wall}
