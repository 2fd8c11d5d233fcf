-- Take ready jobs of a class off their stream, the oldest first. since: by id, the entry's name. room: what is left of the
-- worker's share. Needs batch.lua and share.lua. Returns in how many ms those left to others may be taken, or -1.
local function take_ready(stream, count, room, wall, ids, since)
  local left_ms
  count, left_ms = within_share(stream, count, room, wall)
  if count <= 0 then return left_ms end
  local read = redis.call('XREADGROUP', 'GROUP', 'workers', 'fabric', 'COUNT', count, 'NOACK', 'STREAMS', stream, '>')
  local entries = {}
  for n, entry in ipairs(read and read[1][2] or {}) do
    entries[n], ids[#ids + 1], since[entry[2][2]] = entry[1], entry[2][2], entry[1]
  end
  call_in_parts('XDEL', stream, entries)
  return left_ms
end
