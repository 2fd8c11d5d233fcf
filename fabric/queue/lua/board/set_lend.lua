-- set_lend(subject, setting | '', facts, bell_ttl_ms, event_count_max, then for a change of what was read: its row | '')
-- Keep what a serving team said ('': nothing any more), wake the workers that it concerns, and write down who said it:
-- all of it or nothing, and nobody else is needed for it. Their bells hold at most one ring each.
-- Returns the event's id · 0 what was said is not the row any more (nothing written)
-- keys fabric.events fabric.lends bells...
-- flags allow-oom
if ARGV[6] and (redis.call('HGET', fabric.lends, ARGV[1]) or '') ~= ARGV[6] then return 0 end
if ARGV[2] == '' then
  redis.call('HDEL', fabric.lends, ARGV[1])
else
  redis.call('HSET', fabric.lends, ARGV[1], ARGV[2])
end
for _, bell in ipairs(bells) do
  redis.call('LPUSH', bell, '1')
  redis.call('LTRIM', bell, 0, 0)
  redis.call('PEXPIRE', bell, ARGV[4])
end
return redis.call('XADD', fabric.events, 'MAXLEN', '~', ARGV[5], '*', 'kind', 'lend.switched', 'facts', ARGV[3])
