-- put_manifest(epoch, version, kind, manifest)
-- Write a version's manifest, if its publisher is still in charge. Twin: rules/publish.py, may_put.
--   KEYS[1] head hash   version, epoch, kind, moved_by   KEYS[2] manifests hash   "version:kind" → manifest
-- Returns {code, head version, head epoch}; codes: 1 written · 2 the same is there · -1 another publisher took over ·
-- -5 the version already means something else. Below 1 nothing is written.
local epoch, version, kind, manifest = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local head = redis.call('HMGET', KEYS[1], 'version', 'epoch')
local head_version, head_epoch = tonumber(head[1] or -1), tonumber(head[2] or 0)
if head_epoch ~= tonumber(epoch) then return {-1, head_version, head_epoch} end
local name = ARGV[2] .. ':' .. kind
local known = redis.call('HGET', KEYS[2], name)
if known == manifest then return {2, head_version, head_epoch} end
if version > head_version or (version == head_version and kind == 'keyframe' and not known) then
  redis.call('HSET', KEYS[2], name, manifest)
  return {1, head_version, head_epoch}
end
return {-5, head_version, head_epoch}
