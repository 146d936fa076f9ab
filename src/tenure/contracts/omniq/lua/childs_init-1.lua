-- Begins to count the children of a parent.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {cc:parent}:meta, which is never written; the counter's keys are made from its prefix
-- ARGV[1] number of children
-- Returns { 'OK' } or { 'ERR', NO_EXPECTED | BAD_EXPECTED | ALREADY_INIT }
-- Clauses O-27 O-43
local base = string.sub(KEYS[1], 1, -6)
local expected = ARGV[1]
if not expected or expected == '' then
  return { 'ERR', 'NO_EXPECTED' }
end
local n = tonumber(expected)
if not n or n < 1 or n > 9e15 or n ~= math.floor(n) then
  return { 'ERR', 'BAD_EXPECTED' }
end
if redis.call('TYPE', base .. ':count').ok == 'string' then
  return { 'ERR', 'ALREADY_INIT' }
end
redis.call('SET', base .. ':count', expected)
redis.call('DEL', base .. ':done', base .. ':last')
return { 'OK' }
