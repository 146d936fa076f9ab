-- Appends an entry to the audit log if the log still ends with the entry that was seen, and removes
-- the oldest entries if it is told to.
-- KEYS[1]  the log, a stream
-- ARGV     [1] the id of the last entry seen ("" for an empty log), [2] number, [3] hash of the
--          entry before it, [4] its own hash, [5] its text, [6] the id of the oldest entry to keep
--          ("" to keep all)
-- Returns  the id of the entry, or nil when the log has gone on
-- Clauses  I-44
local last = redis.call('XREVRANGE', KEYS[1], '+', '-', 'COUNT', 1)
if (last[1] and last[1][1] or '') ~= ARGV[1] then
  return false
end
local id = redis.call('XADD', KEYS[1], '*', 'n', ARGV[2], 'p', ARGV[3], 'h', ARGV[4], 'e', ARGV[5])
if ARGV[6] ~= '' then
  redis.call('XTRIM', KEYS[1], 'MINID', ARGV[6])
end
return id
