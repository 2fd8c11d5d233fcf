-- offer(data, ttl_ms, announcement_count_max)
-- Put up an offer in place of the last one, and wake those who wait for the head.
-- keys weights.announcements weights.offer
-- flags allow-oom
redis.call('SET', weights.offer, ARGV[1], 'PX', ARGV[2])
redis.call('XADD', weights.announcements, 'MAXLEN', ARGV[3], '*', 'offer', 1)
