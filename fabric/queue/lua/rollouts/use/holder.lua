-- Whether a consumer may end an entry of the completed stream: it holds it, or nobody does, as after a fail-over that
-- lost the delivery. One that is gone from the stream was taken back, and whoever held it lost it then.
-- keys shard.completed
local function may_end(entry_id, consumer)
  local held = redis.call('XPENDING', shard.completed, 'trainer', entry_id, entry_id, 1)
  if held[1] then return held[1][2] == consumer end
  return #redis.call('XRANGE', shard.completed, entry_id, entry_id) > 0
end
