-- One child is done: each counts once. The last answer, 0, can be had again for a day, so that a child that
-- died between hearing it and acting on it does not lose the join.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with {cc:parent} before it: the anchor of the counter, never written
-- ARGV[1] the child's id
-- Returns { 'OK', how many are left } or { 'ERR', CHILD_REQUIRED | NO_COUNTER }
-- Clauses O-27 O-43
local base = string.sub(KEYS[1], 1, -6)
local count, done = base .. ':count', base .. ':done'
if not ARGV[1] or ARGV[1] == '' then
  return { 'ERR', 'CHILD_REQUIRED' }
end
local left = tonumber(redis.call('GET', count))
if not left then
  if redis.call('SISMEMBER', done, ARGV[1]) == 1 then
    return { 'OK', 0 }
  end
  return { 'ERR', 'NO_COUNTER' }
end
if redis.call('SADD', done, ARGV[1]) == 1 then
  left = redis.call('DECR', count)
end
if left <= 0 then
  redis.call('DEL', count)
  redis.call('EXPIRE', done, 86400)
  left = 0
end
return { 'OK', left }
