-- read_lease(worker)
-- A worker's lease on one run.      KEYS[1] leases hash   KEYS[2] clock
-- Returns {now_ms, "lease_epoch slot_count lease_until_ms" | false}
-- flags allow-oom
-- use look time
return {now_ms(KEYS[2]), redis.call('HGET', KEYS[1], ARGV[1])}
