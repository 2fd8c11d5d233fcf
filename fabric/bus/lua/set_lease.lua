-- set_lease(worker, lease_epoch, slot_count, duration_ms | 0, remove)
-- Publish, extend, shrink or end a worker's lease; an older epoch never overwrites a newer one.
--   KEYS[1] leases hash   worker → "lease_epoch slot_count lease_until_ms" (0: standing)   KEYS[2] clock
-- Returns 2 it is another lease now · 1 the same, extended · -1 a newer lease is in place (nothing written)
-- flags allow-oom
-- use look time
local held = redis.call('HGET', KEYS[1], ARGV[1])
local held_epoch = held and tonumber(string.match(held, '^%d+')) or -1
if held_epoch > tonumber(ARGV[2]) then return -1 end
if ARGV[5] == '1' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return 2
end
local until_ms = 0
if ARGV[4] ~= '0' then until_ms = now_ms(KEYS[2]) + tonumber(ARGV[4]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%s %s %d', ARGV[2], ARGV[3], until_ms))
return held_epoch == tonumber(ARGV[2]) and 1 or 2
