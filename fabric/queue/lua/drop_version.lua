-- drop_version(epoch, name)
-- Delete a version, or some of its chunks, if its publisher is still in charge. Twin: rules/weights/publish.py, may_drop.
--   KEYS[1] head hash   version, epoch, kind, moved_by   KEYS[2] manifests hash, or sending hash   KEYS[3..] chunks
-- name: its field in that hash, with the last of its chunks; '' before.
-- Returns {code, head version, head epoch}; codes: 1 deleted · -1 another publisher took over.
-- flags allow-oom
-- use count head
local head_version, head_epoch = read_head(KEYS[1])
if head_epoch ~= tonumber(ARGV[1]) then return {-1, head_version, head_epoch} end
if #KEYS > 2 then redis.call('UNLINK', unpack(KEYS, 3)) end
if ARGV[2] ~= '' then redis.call('HDEL', KEYS[2], ARGV[2]) end
return {1, head_version, head_epoch}
