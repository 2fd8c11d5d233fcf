-- clock()
-- What a shard's clock shows, and the machine's own; neither is set, so those who only read may ask.
-- Returns {now_ms, wall_ms, unseen_ms}; unseen_ms: what passed since anybody set it last, beyond what the clock shows.
-- keys clock
-- flags allow-oom
-- use look
local wall, now, unseen = look(clock)
return {now, wall, unseen}
