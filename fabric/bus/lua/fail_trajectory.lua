-- fail_trajectory(id, fence, group_id, dead_letter, attempt_count_max)
-- One attempt has failed: try again from the start, or give up into the dead letters. Never a reward of 0.
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] held hash   KEYS[4] job hash   KEYS[5] log hash
--   KEYS[6..12] turns: record, deadline, held, job, log, agent, result      (deleted)
--   KEYS[13] group hash   KEYS[14] rollouts hash   KEYS[15] completed stream   KEYS[16] counters
--   KEYS[17] ready stream   KEYS[18] bell   KEYS[19] dead hash
-- Returns 2 waiting for the next attempt · 3 in the dead letters · 0 the fence is stale (nothing written)
-- use batch record ring forget_turns close
local id, fence, group_id = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local r = read_record(KEYS[1], id)
if not r or r.fence ~= fence or (r.state ~= 'claimed' and r.state ~= 'scoring') then return 0 end
end_claim(KEYS[2], KEYS[3], id, r)
forget_turns({KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]}, id)
redis.call('HDEL', KEYS[5], id)
redis.call('HDEL', KEYS[14], id)
r.attempt, r.worker = r.attempt + 1, '-'
redis.call('HINCRBY', KEYS[16], 'attempts_failed', 1)
if r.attempt < tonumber(ARGV[5]) then
  r.state = 'ready'
  write_record(KEYS[1], id, r)
  make_ready(KEYS[17], KEYS[18], {id})
  return 2
end
r.state = 'failed'
write_record(KEYS[1], id, r)
redis.call('HDEL', KEYS[4], id)
redis.call('HSET', KEYS[19], id, ARGV[4])
close(KEYS[13], KEYS[15], KEYS[16], group_id, 'failed')
return 3
