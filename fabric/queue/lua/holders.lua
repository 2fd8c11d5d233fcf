-- holders()
-- Who is live, and what it said. Nothing is written, so those who only read may ask.
--   KEYS[1] holders hash   holder → row   KEYS[2] holding zset   holder → until when   KEYS[3] clock
--   KEYS[4] addresses hash   holder → where it serves; not given: who asks may not know
-- Returns {holders, rows, addresses}; there are no more than hold.lua lets be.
-- flags allow-oom
-- use batch look
local _, now = look(KEYS[3])
local ids = redis.call('ZRANGEBYSCORE', KEYS[2], string.format('(%d', now), '+inf')
return {ids, fetch_all(KEYS[1], ids), KEYS[4] and fetch_all(KEYS[4], ids) or {}}
