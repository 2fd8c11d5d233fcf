-- Whether a run holds so much that only urgent trajectories may be started: its memory limit is reached and complete
-- groups wait for the trainer. When none wait, unfinished groups hold the memory, and only going on frees it.
-- keys shard.completed shard.run
local function must_wait_for_consumer()
  local facts = redis.call('HMGET', shard.run, 'bytes', 'bytes_max')
  if whole(facts[1], 0) < whole(facts[2], 0) then return false end
  return redis.call('XLEN', shard.completed) > redis.call('XPENDING', shard.completed, 'trainer')[1]
end
