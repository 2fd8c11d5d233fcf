-- The head of a run's weights, as version, epoch, kind, moved_by. Needs count.lua before it.
-- Where no number stands, because there is none or somebody wrote over it: -1 and 0.
local function read_head(key)
  local head = redis.call('HMGET', key, 'version', 'epoch', 'kind', 'moved_by')
  return whole(head[1], -1), whole(head[2], 0), head[3], whole(head[4], 0)
end
