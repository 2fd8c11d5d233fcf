-- A turn's tokens so far are kept in three fields (rules/queue/token_parts.py). Twin: queue/keys.py, PART_ENDINGS.
-- Needs batch.lua before it.
local function log_fields(ids)
  local fields = {}
  for _, id in ipairs(ids) do
    local n = #fields
    fields[n + 1], fields[n + 2], fields[n + 3] = id, id .. '~1', id .. '~2'
  end
  return fields
end

-- The parts of each turn's log, false where there is none.
local function fetch_logs(key, ids)
  local found, logs = fetch_all(key, log_fields(ids)), {}
  for n = 1, #ids do logs[n] = {found[3 * n - 2], found[3 * n - 1], found[3 * n]} end
  return logs
end

local function forget_logs(key, ids)
  call_in_parts('HDEL', key, log_fields(ids))
end

-- How far a turn has come: this grows with every token that is saved.
local function log_size(key, id)
  local size = 0
  for _, field in ipairs(log_fields({id})) do size = size + redis.call('HSTRLEN', key, field) end
  return size
end
