-- Needs record.lua before it.
-- What becomes of a ready record that a worker claims, its new fence, and what it lost; nil: it is none, or not ready.
local function claimed(value, worker, inside)
  if not value then return nil end
  local fence, attempt, loss, rest = string.match(value, '^ready (%d+) (%d+) (%d+) (%d+ %d+ %d+) %d+ %S+$')
  if not fence or #value > RECORD_LENGTH_MAX then
    local r = parse_record(value)
    if not r or r.state ~= 'ready' then return nil end
    fence, attempt, loss, rest = r.fence, r.attempt, r.loss, string.format('%d %d %d', r.rerun, r.blame, r.seen)
  end
  fence, attempt, loss = tonumber(fence) + 1, tonumber(attempt), tonumber(loss)
  return string.format('claimed %d %d %d %s %s %s', fence, attempt, loss, rest, inside, worker), fence, attempt, loss
end
