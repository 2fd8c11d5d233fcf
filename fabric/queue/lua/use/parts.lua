-- A turn's tokens so far are kept in three parts (rules/queue/token_parts.py), by the fields that are called as the turn
-- and as the turn with ~1 and ~2; the one with ~0 says which they are. Twin: queue/keys.py, PART_ENDINGS. Needs batch.lua.
local function log_fields(ids, ...)
  local fields = {}
  for _, id in ipairs(ids) do
    fields[#fields + 1] = id
    for _, ending in ipairs({...}) do fields[#fields + 1] = id .. ending end
  end
  return fields
end

-- The parts of each turn's log, by turn; a part is false where there is none.
local function fetch_logs(key, ids)
  local found, logs = fetch_all(key, log_fields(ids, '~1', '~2')), {}
  for n, id in ipairs(ids) do logs[id] = {found[3 * n - 2], found[3 * n - 1], found[3 * n]} end
  return logs
end

local function forget_logs(key, ids)
  if #ids == 0 or redis.call('EXISTS', key) == 0 then return end -- short turns are never saved
  call_in_parts('HDEL', key, log_fields(ids, '~0', '~1', '~2'))
end

-- How far a turn has come: this grows with every token that is saved.
local function log_size(key, id)
  local size = 0
  for _, field in ipairs(log_fields({id}, '~1', '~2')) do size = size + redis.call('HSTRLEN', key, field) end
  return size
end
