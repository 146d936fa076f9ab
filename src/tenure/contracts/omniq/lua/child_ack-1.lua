-- Counts one child as done. Each child counts once, and the last one deletes the counter. If the last answer was lost,
-- the same request gets it again.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {cc:parent}:meta, which is never written; the counter's keys are made from its prefix
-- ARGV[1] the child's id  ARGV[2] the caller's request id (SDKs send none); a caller that gets 0 deletes `last`
-- Returns { 'OK', children left } or { 'ERR', CHILD_REQUIRED | NO_COUNTER }
-- Clauses O-27 O-43
local base = string.sub(KEYS[1], 1, -6)
local count, done, last = base .. ':count', base .. ':done', base .. ':last'

local function is_a(kind, key)
  local found = redis.call('TYPE', key).ok
  return found == kind or found == 'none'
end

if not ARGV[1] or ARGV[1] == '' then
  return { 'ERR', 'CHILD_REQUIRED' }
end
local left = is_a('string', count) and tonumber(redis.call('GET', count))
if not left or left ~= math.floor(left) or left > 9e15 then
  if ARGV[2] and is_a('string', last) and redis.call('GET', last) == ARGV[2] then
    return { 'OK', 0 }
  end
  return { 'ERR', 'NO_COUNTER' }
end
if not is_a('set', done) then
  redis.call('DEL', done) -- another program wrote it; which children were counted is lost
end
if redis.call('SADD', done, ARGV[1]) == 1 then
  left = left - 1
  redis.call('SET', count, string.format('%.0f', left))
end
if left <= 0 then
  redis.call('DEL', count, done)
  if ARGV[2] then
    redis.call('SET', last, ARGV[2], 'PX', '60000')
  end
  left = 0
end
return { 'OK', left }
