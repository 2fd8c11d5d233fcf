-- mend(epoch, name, manifest, data...)
-- Write a manifest and some chunks again, if their publisher is still in charge. Twin: rules/weights/publish.py, may_drop.
--   KEYS[1] head hash   version, epoch, kind, moved_by   KEYS[2] manifests hash   KEYS[3..] chunks, ARGV[4..] their data
-- What lies in their place may be of any type: whoever damaged it may have written anything.
-- Returns {code, head version, head epoch}; codes: 1 written · -1 another publisher took over.
-- use count head
local head_version, head_epoch = read_head(KEYS[1])
if head_epoch ~= tonumber(ARGV[1]) then return {-1, head_version, head_epoch} end
local kind = redis.call('TYPE', KEYS[2]).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('UNLINK', KEYS[2]) end
redis.call('HSET', KEYS[2], ARGV[2], ARGV[3])
for n = 3, #KEYS do redis.call('SET', KEYS[n], ARGV[n + 1]) end
return {1, head_version, head_epoch}
