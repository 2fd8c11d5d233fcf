-- drop_version(epoch, name)
-- Delete a version, or some of its chunks, if its publisher is still in charge. Twin: rules/publish.py, may_drop.
--   KEYS[1] head hash   version, epoch, kind, moved_by   KEYS[2] manifests hash, or sending hash   KEYS[3..] chunks
-- name: its field in that hash, with the last of its chunks; '' before.
-- Returns {code, head version, head epoch}; codes: 1 deleted · -1 another publisher took over.
-- flags allow-oom
local head = redis.call('HMGET', KEYS[1], 'version', 'epoch')
local head_version, head_epoch = tonumber(head[1] or -1), tonumber(head[2] or 0)
if head_epoch ~= tonumber(ARGV[1]) then return {-1, head_version, head_epoch} end
if #KEYS > 2 then redis.call('UNLINK', unpack(KEYS, 3)) end
if ARGV[2] ~= '' then redis.call('HDEL', KEYS[2], ARGV[2]) end
return {1, head_version, head_epoch}
