-- read_lease(worker)
-- A worker's lease on one run.
-- Returns {now_ms, "lease_epoch slot_count lease_until_ms" | false}
-- keys shard.clock shard.leases
-- flags allow-oom
-- use look time
return {now_ms(shard.clock), redis.call('HGET', shard.leases, ARGV[1])}
