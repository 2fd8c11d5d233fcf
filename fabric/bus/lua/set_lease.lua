-- set_lease(worker, lease_epoch, slot_count, duration_ms | 0, remove)
-- Publish, extend, shrink or end a worker's lease; an older epoch never overwrites a newer one.
--   KEYS[1] leases hash   worker → "lease_epoch slot_count lease_until_ms" (0: standing)
-- Returns lease_until_ms · -1 a newer lease is in place (nothing written)
-- use time
local held = redis.call('HGET', KEYS[1], ARGV[1])
if held and tonumber(string.match(held, '^%d+')) > tonumber(ARGV[2]) then return -1 end
if ARGV[5] == '1' then
  redis.call('HDEL', KEYS[1], ARGV[1])
  return 0
end
local until_ms = 0
if ARGV[4] ~= '0' then until_ms = now_ms() + tonumber(ARGV[4]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%s %s %d', ARGV[2], ARGV[3], until_ms))
return until_ms
