-- open_publisher()
-- Take charge of a run's weights: a new epoch, which every older publisher's writes are refused against.
-- The first of a run, and one after somebody wrote over the epoch, is the machine's milliseconds: above all that there were,
-- also of a run of this name that was deleted, whose publishers may still write.
-- Returns {epoch, head version}
-- keys weights.head
-- flags allow-oom
-- use count head
local version, epoch = read_head(weights.head)
if epoch < 1 then
  local time = redis.call('TIME')
  epoch = time[1] * 1000 + math.floor(time[2] / 1000)
end
redis.call('HSET', weights.head, 'version', version, 'epoch', epoch + 1)
return {epoch + 1, version}
