-- A run's rewards by policy version: hash of number → "count sum squares min max tokens", and "width" (queue/keys.py).
-- Twin of the rule: rules/queue/curve.py, which says what a bucket is. Every rollout costs the same, on the average.
local BUCKET_COUNT_MAX = 256

-- A bucket's six numbers; nothing of a row that is none.
local function numbers_in(row)
  local found = {string.match(row, '^(%d+) (%S+) (%S+) (%S+) (%S+) (%d+)$')}
  for n = 1, 6 do
    found[n] = tonumber(found[n] or '')
    if not found[n] then return end
  end
  return unpack(found)
end

-- What two buckets are together, the first perhaps none.
local function joined(row, count, sum, squares, least, most, tokens)
  if row then
    local c, s, q, l, m, t = numbers_in(row)
    if t then
      count, sum, squares, tokens = count + c, sum + s, squares + q, tokens + t
      least, most = math.min(least, l), math.max(most, m)
    end
  end
  return string.format('%d %.17g %.17g %.17g %.17g %d', count, sum, squares, least, most, tokens)
end

-- Double the width until half as many buckets are left as there may be.
local function coarsen(key, width)
  local rows, count = redis.call('HGETALL', key), nil
  local found = {}
  for n = 1, #rows, 2 do
    local number = whole(rows[n])
    if number and select(6, numbers_in(rows[n + 1])) then found[number] = rows[n + 1] end
  end
  repeat
    local wider = {}
    count, width = 0, width * 2
    for number, row in pairs(found) do
      local place = math.floor(number / 2)
      if not wider[place] then count = count + 1 end
      wider[place] = joined(wider[place], numbers_in(row))
    end
    found = wider
  until count <= BUCKET_COUNT_MAX / 2
  local lines = {'width', string.format('%d', width)}
  for number, row in pairs(found) do add_pair(lines, string.format('%d', number), row) end
  redis.call('DEL', key)
  call_in_parts('HSET', key, lines)
end

-- Count the reward of one rollout that is complete.
local function note_reward(key, version, reward, tokens)
  redis.call('HSETNX', key, 'width', 1)
  local width = math.max(1, whole(redis.call('HGET', key, 'width'), 1))
  local number = string.format('%d', math.floor(version / width))
  local row = joined(redis.call('HGET', key, number), 1, reward, reward * reward, reward, reward, tokens)
  if redis.call('HSET', key, number, row) == 1 and redis.call('HLEN', key) > BUCKET_COUNT_MAX + 1 then
    coarsen(key, width)
  end
end
