-- drop_version(epoch, name)
-- Delete a version, or some of its chunks, if its publisher is still in charge.
-- versions: the manifests hash, or the sending hash. name: its field there, with the last of its chunks; '' before.
-- Returns {code, head version, head epoch}; codes: 1 deleted · -1 another publisher took over.
-- keys weights.head versions chunks...
-- flags allow-oom
-- use count head
local head_version, head_epoch = read_head(weights.head)
if head_epoch ~= tonumber(ARGV[1]) then return {-1, head_version, head_epoch} end
if #chunks > 0 then redis.call('UNLINK', unpack(chunks)) end
if ARGV[2] ~= '' then redis.call('HDEL', versions, ARGV[2]) end
return {1, head_version, head_epoch}
