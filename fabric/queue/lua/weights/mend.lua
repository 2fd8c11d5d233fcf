-- mend(epoch, name, manifest, then per chunk: data)
-- Write a manifest and some chunks again, if their publisher is still in charge.
-- What lies in their place may be of any type: whoever damaged it may have written anything.
-- Returns {code, head version, head epoch}; codes: 1 written · -1 another publisher took over.
-- keys weights.head weights.manifests chunks...
-- use count head
local head_version, head_epoch = read_head(weights.head)
if head_epoch ~= tonumber(ARGV[1]) then return {-1, head_version, head_epoch} end
local kind = redis.call('TYPE', weights.manifests).ok
if kind ~= 'hash' and kind ~= 'none' then redis.call('UNLINK', weights.manifests) end
redis.call('HSET', weights.manifests, ARGV[2], ARGV[3])
for n, chunk in ipairs(chunks) do redis.call('SET', chunk, ARGV[n + 3]) end
return {1, head_version, head_epoch}
