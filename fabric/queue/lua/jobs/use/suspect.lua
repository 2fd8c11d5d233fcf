-- What speaks against a job whose worker was lost, or at which a worker stalled.
local function clear(r)
  r.loss, r.blame, r.seen = 0, 0, 0
end

local function note_loss(r, come, could_be_it, suspect_loss)
  local was_suspect = r.loss >= suspect_loss and come == r.seen
  if come ~= r.seen then r.loss, r.blame, r.seen = 0, 0, come end
  if could_be_it then
    r.loss = r.loss + 1
    if was_suspect then r.blame = r.blame + 1 end
  end
end

local function note_stall(r, come)
  if come ~= r.seen then r.loss, r.blame, r.seen = 0, 0, come end
  r.loss, r.blame = r.loss + 1, r.blame + 1
end

local SUSPECT_TRIES = 64

-- The first suspect that waits; those that are gone, or were made up, are dropped, and so many looked at in one call.
local function next_suspect(suspects, record)
  for _ = 1, SUSPECT_TRIES do
    local id = redis.call('LPOP', suspects)
    if not id then return nil end
    if redis.call('HEXISTS', record, id) == 1 then return id end
  end
end
