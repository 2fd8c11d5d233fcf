-- open_publisher()
-- Take charge of a run's weights: a new epoch, which every older publisher's writes are refused against.
--   KEYS[1] head hash   version, epoch, kind, moved_by   (written by advance_head)
-- Returns {epoch, head version}
-- flags allow-oom
redis.call('HSETNX', KEYS[1], 'version', -1)
local epoch = redis.call('HINCRBY', KEYS[1], 'epoch', 1)
return {epoch, tonumber(redis.call('HGET', KEYS[1], 'version'))}
