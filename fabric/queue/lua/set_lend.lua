-- set_lend(subject, setting | '', facts, bell_ttl_ms, event_count_max, then for a change of what was read: its row | '')
-- Keep what a serving team said ('': nothing any more), wake the workers that it concerns, and write down who said it:
-- all of it or nothing, and nobody else is needed for it.
--   KEYS[1] lends hash   KEYS[2] events stream, bounded
--   KEYS[3…] lease bell lists of these workers, each bounded to one ring
-- Returns the event's id · 0 what was said is not the row any more (nothing written)
-- flags allow-oom
if ARGV[6] and (redis.call('HGET', KEYS[1], ARGV[1]) or '') ~= ARGV[6] then return 0 end
if ARGV[2] == '' then
  redis.call('HDEL', KEYS[1], ARGV[1])
else
  redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
end
for index = 3, #KEYS do
  redis.call('LPUSH', KEYS[index], '1')
  redis.call('LTRIM', KEYS[index], 0, 0)
  redis.call('PEXPIRE', KEYS[index], ARGV[4])
end
return redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[5], '*', 'kind', 'lend.switched', 'facts', ARGV[3])
