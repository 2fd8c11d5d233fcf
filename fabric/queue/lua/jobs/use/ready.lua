-- Take ready jobs of a class off their stream, the oldest first. since: by id, the entry's name. Needs batch.lua.
local function take_ready(stream, count, ids, since)
  local read = redis.call('XREADGROUP', 'GROUP', 'workers', 'fabric', 'COUNT', count, 'NOACK', 'STREAMS', stream, '>')
  local entries = {}
  for n, entry in ipairs(read and read[1][2] or {}) do
    entries[n], ids[#ids + 1], since[entry[2][2]] = entry[1], entry[2][2], entry[1]
  end
  call_in_parts('XDEL', stream, entries)
end
