-- clock()
-- What a shard's clock shows; it is not set, so those who only read may ask.      KEYS[1] clock
-- flags allow-oom
-- use look
local _, now = look(KEYS[1])
return now
