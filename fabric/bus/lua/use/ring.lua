-- Put jobs back on (or onto) their ready stream and wake idle workers. BELL_COUNT_MAX is in keys.py.
local function make_ready(ready, bell, ids)
  local rings = {}
  for n, id in ipairs(ids) do
    redis.call('XADD', ready, '*', 'id', id)
    if n <= 64 then rings[n] = '1' end
  end
  if #rings > 0 and redis.call('LPUSH', bell, unpack(rings)) > 64 then redis.call('LTRIM', bell, 0, 63) end
end
