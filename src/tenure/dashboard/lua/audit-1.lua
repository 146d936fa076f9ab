-- Appends an entry to the audit log if the log still ends with the entry that the caller has seen,
-- and removes the oldest entries if requested. If an entry has the highest possible id, there is no
-- id for the next one; then the log is rewritten, with current ids for entries of the far future.
-- KEYS[1]  the log, a stream
-- ARGV     [1] the id of the last entry seen ("" for an empty log), [2] number, [3] hash of the
--          entry before it, [4] its own hash, [5] its text, [6] the id of the oldest entry to keep
--          ("" to keep all)
-- Returns  the id of the entry, or nil if another entry was added meanwhile
-- Clauses  I-44
local TIME_DIGITS = 15

local function add(id, number, prev, own, text)
  return redis.pcall('XADD', KEYS[1], id, 'n', number, 'p', prev, 'h', own, 'e', text)
end

-- Only deleting the stream resets its last id (XSETID refuses an id below a deleted one).
local function rewrite()
  local entries = redis.call('XRANGE', KEYS[1], '-', '+')
  redis.call('DEL', KEYS[1])
  for _, entry in ipairs(entries) do
    local named = {n = '', p = '', h = '', e = ''}
    for at = 1, #entry[2] - 1, 2 do
      named[entry[2][at]] = entry[2][at + 1]
    end
    local is_sane = string.find(entry[1], '-', 1, true) <= TIME_DIGITS + 1
    add(is_sane and entry[1] or '*', named.n, named.p, named.h, named.e)
  end
end

local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if (last[1] and last[1][1] or '') ~= ARGV[1] then
  return false
end
local id = add('*', ARGV[2], ARGV[3], ARGV[4], ARGV[5])
if id.err and string.find(id.err, 'exhausted', 1, true) then
  rewrite()
  id = add('*', ARGV[2], ARGV[3], ARGV[4], ARGV[5])
end
if id.err then
  return id
end
if ARGV[6] ~= '' then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[6])
end
return id
