-- add_event(kind, facts, event_count_max)
-- Tell people what happened.      KEYS[1] events stream, bounded
-- flags allow-oom
return redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[3], '*', 'kind', ARGV[1], 'facts', ARGV[2])
