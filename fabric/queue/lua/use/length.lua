-- How long trajectories of a task were, and those of all tasks: "count sum", of those that ended last. Needs count.lua.
-- Rules and bounds: rules/queue/length.py. A task is called by four hexadecimal digits, all together "-".
-- keys shard.lengths
local LONG, KNOWN_COUNT, TASK_COUNT, RUN_COUNT = 1.5, 16, 16, 1024

local function length_so_far(name)
  local count, sum = string.match(redis.call('HGET', shard.lengths, name) or '', '^(%d+) (%d+)$')
  if not count or #count + #sum > 20 then return 0, 0 end -- none yet, or somebody else wrote it
  return tonumber(count), tonumber(sum)
end

local function add_length(name, length, count_max)
  local count, sum = length_so_far(name)
  if count >= count_max then count, sum = math.floor(count_max / 2), math.floor(sum * count_max / 2 / count) end
  redis.call('HSET', shard.lengths, name, string.format('%d %d', count + 1, sum + length))
end

-- Count a trajectory that ended. task '': the run's order does not ask for it.
local function note_length(task, length)
  if task == '' then return end
  add_length(task, length, TASK_COUNT)
  add_length('-', length, RUN_COUNT)
end

-- Whether a task's trajectories take much longer than the run's do.
local function is_long(task)
  if task == '' then return false end
  local count, sum = length_so_far(task)
  local all_count, all_sum = length_so_far('-')
  return count > 0 and all_count >= KNOWN_COUNT and sum * all_count >= LONG * all_sum * count and sum > 0
end
