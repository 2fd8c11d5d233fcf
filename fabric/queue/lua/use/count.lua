-- Numbers in rows that others may have written, too.
-- A whole number of a row that others may have written, or `default`.
local function whole(value, default)
  return value and #value <= 16 and tonumber(string.match(value, '^%-?%d+$')) or default
end

-- Count on a field of a hash. One that was no number begins anew: it must not stop those who count beside it.
local function tally(key, field, by)
  local sum = redis.pcall('HINCRBY', key, field, by)
  if type(sum) == 'number' then return sum end
  redis.call('HSET', key, field, by)
  return by
end

-- Count what came too late; not of a run that was deleted meanwhile: its counters would stay behind.
local function tally_refused(counters, by)
  if redis.call('EXISTS', counters) == 1 then tally(counters, 'refused', by) end
end
