-- What a run's fences go on from: the machine's time in steps of 20 ms as it was made. It tells the run from any other
-- of its name, which was deleted or lost: whoever still works for that one can write nothing here. Needs count.lua before it.
-- keys shard.run
local function first_fence() return whole(redis.call('HGET', shard.run, 'first_fence'), 0) end
