-- open_publisher()
-- Take charge of a run's weights: a new epoch, which every older publisher's writes are refused against.
-- Where somebody wrote over the epoch or removed it, the new one is the machine's seconds: above all that there were.
-- Returns {epoch, head version}
-- keys weights.head
-- flags allow-oom
-- use count head
local version, epoch = read_head(weights.head)
if epoch < 1 and redis.call('EXISTS', weights.head) == 1 then epoch = tonumber(redis.call('TIME')[1]) end
redis.call('HSET', weights.head, 'version', version, 'epoch', epoch + 1)
return {epoch + 1, version}
