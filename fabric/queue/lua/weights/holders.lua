-- holders(is_addressed)
-- Who is live, and what it said. Nothing is written, so those who only read may ask; and with is_addressed 1,
-- which not everyone may, where each serves.
-- Returns {holders, rows, addresses}; there are no more than hold.lua lets be.
-- keys weights.addresses weights.clock weights.holders weights.holding
-- flags allow-oom
-- use batch look
local _, now = look(weights.clock)
local ids = redis.call('ZRANGEBYSCORE', weights.holding, string.format('(%d', now), '+inf')
return {ids, fetch_all(weights.holders, ids), ARGV[1] == '1' and fetch_all(weights.addresses, ids) or {}}
