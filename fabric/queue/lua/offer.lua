-- offer(data, ttl_ms, announcement_count_max)
-- Put up an offer in place of the last one, and wake those who wait for the head.
--   KEYS[1] offer string   KEYS[2] announcements stream
-- flags allow-oom
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
redis.call('XADD', KEYS[2], 'MAXLEN', ARGV[3], '*', 'offer', 1)
