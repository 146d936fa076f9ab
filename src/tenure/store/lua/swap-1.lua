-- Replaces a record of a group if it is as the caller found it. A call that is sent again answers the same.
-- KEYS[1] group: a hash of records by name
-- ARGV[1] name  ARGV[2] the record before ('': absent)  ARGV[3] the record after ('': removed)
-- ARGV[4] how long the group is kept after this write, ms (0: for ever)
-- Returns 1 if the record is as wanted now, else 0
-- Clauses: none of a contract
local GROUP, NAME, BEFORE, AFTER, KEEP_MS = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local record = redis.call('HGET', GROUP, NAME) or ''
if record == AFTER then
  return 1
elseif record ~= BEFORE then
  return 0
elseif AFTER == '' then
  redis.call('HDEL', GROUP, NAME)
else
  redis.call('HSET', GROUP, NAME, AFTER)
  if KEEP_MS ~= '0' then
    redis.call('PEXPIRE', GROUP, KEEP_MS)
  end
end
return 1
