-- State, fence and worker of a record, as text: most are read for these alone, and a table of all costs twice as much. Needs
-- record.lua before it.
local function head_of(value)
  if not value or #value > RECORD_LENGTH_MAX then return nil end
  local state, fence, worker = string.match(value, '^(%S+) (%d+) %d+ %d+ %d+ %d+ %d+ %d+ (%S+)$')
  if state then return state, fence, worker end
  return string.match(value, '^(%S+) (%d+) %d+ %d+ %d+ (%S+)$')
end
