-- open_shard(depth_max, bytes_max, staleness, when_stale, first_fence, moved_by)
-- Begin a shard of a run, or tell one that is there what the run's settings are now; what it has stays. All of it, at the
-- broker's memory limit too: whoever may lower a run's limits then makes room.
-- keys shard.completed shard.run trajectory.ready turn.ready
-- flags allow-oom
redis.call('HSET', shard.run, 'depth_max', ARGV[1], 'bytes_max', ARGV[2], 'staleness', ARGV[3], 'when_stale', ARGV[4])
if redis.call('HEXISTS', shard.run, 'head_version') == 0 then -- one that has a version goes on as it began
  redis.call('HSETNX', shard.run, 'first_fence', ARGV[5])
  redis.call('HSETNX', shard.run, 'moved_by', ARGV[6])
end
for field, first in pairs({depth = 0, bytes = 0, head_version = -1}) do redis.call('HSETNX', shard.run, field, first) end
local function read_by(stream, group)
  local made = redis.pcall('XGROUP', 'CREATE', stream, group, '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP', 1, true) then error(made.err) end
end
for _, stream in ipairs(trajectory.ready) do read_by(stream, 'workers') end
for _, stream in ipairs(turn.ready) do read_by(stream, 'workers') end
read_by(shard.completed, 'trainer')
return 1
