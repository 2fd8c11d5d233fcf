-- advance_head(epoch, version, kind, base_version, announcement_count_max)
-- Make a version the head, once, and announce it.
-- Returns {code, head version, head epoch} from before; codes: 1 moved · 2 was moved there by the same publisher ·
-- -1 another publisher took over · -2 not newer · -3 its base is not the head · -4 no manifest · -6 a jump.
-- keys weights.announcements weights.head weights.manifests
-- flags allow-oom
-- use count head
local epoch, version, kind, base = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local head_version, head_epoch, head_kind, moved_by = read_head(weights.head)
local function answer(code) return {code, head_version, head_epoch} end
if head_epoch ~= epoch then return answer(-1) end
if kind == 'jump-8' or kind == 'jump-64' then return answer(-6) end
if version == head_version and kind == head_kind and moved_by == epoch then return answer(2) end
if version <= head_version then return answer(-2) end
if kind == 'delta' and base ~= head_version then return answer(-3) end
if redis.call('HEXISTS', weights.manifests, ARGV[2] .. ':' .. kind) == 0 then return answer(-4) end
redis.call('HSET', weights.head, 'version', version, 'kind', kind, 'moved_by', epoch)
redis.call('XADD', weights.announcements, 'MAXLEN', ARGV[5], '*', 'version', version)
return answer(1)
