-- advance_head(epoch, version, kind, base_version, announcement_count_max)
-- Make a version the head, once, and announce it. Twin: rules/weights/publish.py, may_advance.
--   KEYS[1] head hash   version, epoch, kind, moved_by   KEYS[2] manifests hash   KEYS[3] announcements stream
-- Returns {code, head version, head epoch} from before; codes: 1 moved · 2 was moved there by the same publisher ·
-- -1 another publisher took over · -2 not newer · -3 its base is not the head · -4 no manifest · -6 a jump.
-- flags allow-oom
-- use count head
local epoch, version, kind, base = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local head_version, head_epoch, head_kind, moved_by = read_head(KEYS[1])
local function answer(code) return {code, head_version, head_epoch} end
if head_epoch ~= epoch then return answer(-1) end
if kind == 'jump-8' or kind == 'jump-64' then return answer(-6) end
if version == head_version and kind == head_kind and moved_by == epoch then return answer(2) end
if version <= head_version then return answer(-2) end
if kind == 'delta' and base ~= head_version then return answer(-3) end
if redis.call('HEXISTS', KEYS[2], ARGV[2] .. ':' .. kind) == 0 then return answer(-4) end
redis.call('HSET', KEYS[1], 'version', version, 'kind', kind, 'moved_by', epoch)
redis.call('XADD', KEYS[3], 'MAXLEN', ARGV[5], '*', 'version', version)
return answer(1)
