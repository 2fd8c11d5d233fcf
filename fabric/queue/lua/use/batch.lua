-- Many values in one command, some at a time: unpack() holds a few thousand. An even number keeps pairs together.
local PART_COUNT = 1000

local function call_in_parts(command, key, values)
  for first = 1, #values, PART_COUNT do
    redis.call(command, key, unpack(values, first, math.min(first + PART_COUNT - 1, #values)))
  end
end

-- The values of many fields of a hash, in their order; false where there is none.
local function fetch_all(key, fields)
  local found = {}
  for first = 1, #fields, PART_COUNT do
    local part = redis.call('HMGET', key, unpack(fields, first, math.min(first + PART_COUNT - 1, #fields)))
    for n = 1, #part do found[first + n - 1] = part[n] end
  end
  return found
end

local function add_pair(pairs_list, name, value)
  local n = #pairs_list
  pairs_list[n + 1], pairs_list[n + 2] = name, value
end
