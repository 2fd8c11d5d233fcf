-- Terms of leading controllers. Needs count.lua before it.
local TERM_MAX = 2 ^ 32 -- seconds of a hundred years; epochs of a greater one would not be whole numbers

-- The highest term, as a string has it; 0 where somebody wrote there what is none.
local function read_term(key)
  local term = whole(redis.call('GET', key), 0)
  return term <= TERM_MAX and term or 0
end
