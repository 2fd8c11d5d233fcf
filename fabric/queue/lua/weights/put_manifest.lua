-- put_manifest(epoch, version, kind, base_version, manifest, is_whole)
-- Write a version's manifest, if its publisher is still in charge.
-- is_whole: 1 all its chunks were found a moment ago · 0 not (then nothing is written, and only the code is told).
-- Returns {code, head version, head epoch}; codes: 1 granted · 2 the same is there · -1 another publisher took over ·
-- -5 the version already means something else · -6 a jump that does not lead up to the head or below it.
-- keys weights.head weights.manifests weights.sending
-- use count head
local epoch, version, kind, base, manifest = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4]), ARGV[5]
local head_version, head_epoch = read_head(weights.head)
local function answer(code) return {code, head_version, head_epoch} end
if head_epoch ~= epoch then return answer(-1) end
local name = ARGV[2] .. ':' .. kind
local is_ours = {hash = true, none = true}
if not is_ours[redis.call('TYPE', weights.manifests).ok] then redis.call('UNLINK', weights.manifests) end
local known = redis.call('HGET', weights.manifests, name)
local sending = name .. '.' .. ARGV[1]
if known == manifest then
  redis.call('HDEL', weights.sending, sending)
  return answer(2)
end
if kind == 'jump-8' or kind == 'jump-64' then
  if base < 0 or base >= version or version > head_version then return answer(-6) end
  if known then return answer(-5) end
elseif version < head_version or (version == head_version and (kind ~= 'keyframe' or known)) then
  return answer(-5)
end
if ARGV[6] == '1' then
  redis.call('HSET', weights.manifests, name, manifest)
  redis.call('HDEL', weights.sending, sending)
end
return answer(1)
