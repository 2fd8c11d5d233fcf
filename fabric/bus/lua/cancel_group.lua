-- cancel_group(group_id)
-- Drop a group that nobody wants any more; its workers learn it at their next renewal and free their slots.
--   KEYS[1] record hash   KEYS[2] deadline zset   KEYS[3] held hash   KEYS[4] job hash   KEYS[5] log hash
--   KEYS[6..12] turns: record, deadline, held, job, log, agent, result      (deleted)
--   KEYS[13] group hash   KEYS[14] rollouts hash   (deleted)   KEYS[15] completed stream (its entry stays; skipped when read)
--   KEYS[16] counters     KEYS[17] run hash        depth shrinks by the group's size
-- Returns 1 cancelled · 0 no such group (never pushed, consumed, or cancelled before)
-- use batch record forget_turns
local size = redis.call('HGET', KEYS[13], 'size')
if not size then return 0 end
for index = 0, tonumber(size) - 1 do
  local id = ARGV[1] .. '.' .. index
  local r = read_record(KEYS[1], id)
  if r then
    end_claim(KEYS[2], KEYS[3], id, r)
    forget_turns({KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10], KEYS[11], KEYS[12]}, id)
    redis.call('HDEL', KEYS[1], id)
    redis.call('HDEL', KEYS[4], id)
    redis.call('HDEL', KEYS[5], id)
  end
end
redis.call('DEL', KEYS[13], KEYS[14])
redis.call('HINCRBY', KEYS[17], 'depth', -tonumber(size))
redis.call('HINCRBY', KEYS[16], 'groups_cancelled', 1)
return 1
