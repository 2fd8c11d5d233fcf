-- open_publisher()
-- Take charge of a run's weights: a new epoch, which every older publisher's writes are refused against.
-- Where somebody wrote over the epoch or removed it, the new one is the machine's seconds: above all that there were.
--   KEYS[1] head hash   version, epoch, kind, moved_by   (written by advance_head)
-- Returns {epoch, head version}
-- flags allow-oom
-- use count head
local version, epoch = read_head(KEYS[1])
if epoch < 1 and redis.call('EXISTS', KEYS[1]) == 1 then epoch = tonumber(redis.call('TIME')[1]) end
redis.call('HSET', KEYS[1], 'version', version, 'epoch', epoch + 1)
return {epoch + 1, version}
