-- add_event(kind, facts, event_count_max)
-- Tell people what happened.
-- keys fabric.events
-- flags allow-oom
return redis.call('XADD', fabric.events, 'MAXLEN', '~', ARGV[3], '*', 'kind', ARGV[1], 'facts', ARGV[2])
