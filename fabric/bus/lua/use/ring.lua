-- Put a job back on (or onto) its ready stream and wake one idle worker. BELL_COUNT_MAX is in keys.py.
local function make_ready(ready, bell, id)
  redis.call('XADD', ready, '*', 'id', id)
  redis.call('LPUSH', bell, '1')
  redis.call('LTRIM', bell, 0, 63)
end
