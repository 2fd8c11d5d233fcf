-- clock()
-- What a shard's clock shows, and the machine's own; neither is set, so those who only read may ask.
--   KEYS[1] clock
-- Returns {now_ms, wall_ms}
-- flags allow-oom
-- use look
local wall, now = look(KEYS[1])
return {now, wall}
