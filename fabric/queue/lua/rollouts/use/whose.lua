-- Whether a client's run is this one, and not one that was deleted under its name; and whether the version that it
-- evaluates is the one that is evaluated now. '': it does not know, or evaluates none. Needs nothing before it.
-- keys shard.run
local function whose(first_fence, pinned)
  local facts = redis.call('HMGET', shard.run, 'first_fence', 'pinned')
  if first_fence ~= '' and facts[1] ~= first_fence then return 'of another run' end
  return pinned ~= '' and facts[2] and facts[2] ~= pinned and 'of another version'
end
