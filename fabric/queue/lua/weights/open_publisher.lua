-- open_publisher()
-- Take charge of a run's weights: a new epoch, which every older publisher's writes are refused against.
-- It is the machine's milliseconds, or one more than the last: no publisher had it before, also none whose opening a
-- fail-over has lost, and none of a run of this name that was deleted.
-- Returns {epoch, head version}
-- keys weights.head
-- flags allow-oom
-- use count head
local version, epoch = read_head(weights.head)
local time = redis.call('TIME')
epoch = math.max(epoch + 1, time[1] * 1000 + math.floor(time[2] / 1000))
redis.call('HSET', weights.head, 'version', version, 'epoch', epoch)
return {epoch, version}
