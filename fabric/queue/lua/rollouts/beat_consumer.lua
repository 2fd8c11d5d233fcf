-- beat_consumer(name, client_id, duration_ms, is_new, count_max, first_fence | '', pinned | '')
-- A client consumes under a name: what it received is its own for duration_ms from now. It takes over what others
-- received and have not acknowledged: its namesakes' when it is new, since it follows them, and that of whoever is silent.
-- Returns {how many it took over (count_max: ask again), 1 if it was not known (any more), the live namesakes…}; a run
-- that is gone gets nothing written. {-1}: it was made again under its name, and has another first_fence · {-2}: the client evaluates
-- a version, and another one is pinned
-- keys shard.clock shard.completed shard.consumers shard.run
-- flags allow-oom
-- use look time whose
if redis.call('EXISTS', shard.completed) == 0 then return {0, 0} end
local other = whose(ARGV[6], ARGV[7])
if other then return {other == 'of another run' and -1 or -2} end
local me, now, left = ARGV[1] .. '/' .. ARGV[2], now_ms(shard.clock), tonumber(ARGV[5])
local until_ms = now + tonumber(ARGV[3])

local is_unknown = redis.call('ZADD', shard.consumers, until_ms, me)
redis.call('XCLAIM', shard.completed, 'trainer', me, 0, '0-0', 'JUSTID')  -- of no entry: XINFO says when it was heard of
-- Whoever has read without saying how long it lives is given the same time.
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', shard.completed, 'trainer')) do
  redis.call('ZADD', shard.consumers, 'NX', until_ms, row[2])
end

local function take_over(other)
  while left > 0 do
    local ids = {}
    for n, row in ipairs(redis.call('XPENDING', shard.completed, 'trainer', '-', '+', math.min(left, 100), other)) do
      ids[n] = row[1]
    end
    if #ids == 0 then
      redis.call('XGROUP', 'DELCONSUMER', shard.completed, 'trainer', other)
      redis.call('ZREM', shard.consumers, other)
      return
    end
    left = left - #ids
    ids[#ids + 1] = 'JUSTID'
    redis.call('XCLAIM', shard.completed, 'trainer', me, 0, unpack(ids))
  end
end

local answer, rows = {0, is_unknown}, redis.call('ZRANGE', shard.consumers, 0, -1, 'WITHSCORES')
for n = 1, #rows, 2 do
  local other = rows[n]
  local is_namesake = other == ARGV[1] or string.match(other, '^(.*)/[^/]*$') == ARGV[1]
  if other ~= me then
    if tonumber(rows[n + 1]) <= now or (is_namesake and ARGV[4] == '1') then
      take_over(other)
    elseif is_namesake then
      answer[#answer + 1] = other
    end
  end
end
answer[1] = tonumber(ARGV[5]) - left
return answer
