-- Takes up to `limit` leases of an ordinary queue: not paused, not bounded, nothing due, no lock to look
-- for. That is most claims, so it defines nothing it does not run; whatever is not ordinary is left
-- untouched for claim-16.lua.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] token  ARGV[3] worker id  ARGV[4] limit  ARGV[5] lease_ms  ARGV[6..8] as in claim
-- ARGV[9] hash of the token  ARGV[10] 1 when the worker runs no suspect
-- Returns { 'ok' or 'held', now_ms, next due_ms, 0, '', leases, quarantined } as claim does, or 0 when the queue is
--   not ordinary
-- Clauses B-8 B-9 B-10 B-11 B-54
-- @include head
local settings = call('HMGET', META, 'paused', 'concurrency', 'max')
local first = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
local next_due = first[2] and math.floor(math.min(first[2], NEVER) / SLOTS) or 0
if settings[1] or settings[2] or settings[3] or (first[2] and next_due <= NOW) then
  return 0
end
-- @include tn
-- @include start
take_from_lines(LIMIT)
if leases_n > 0 then
  put('LPUSH', ACTIVE, unpack(started))
  if leases_n >= LIMIT or passed_n > 0 then
    redis.pcall('ZADD', MARKER, '0', '0') -- there may be more, for another worker
  end
  for from = 1, lines_n, 200 do
    redis.pcall('XADD', JOURNAL, '*', unpack(lines, from, math.min(from + 199, lines_n)))
  end
end
return { leases_n == 0 and passed_n > 0 and 'held' or 'ok', NOW, next_due, 0, '', leases, quarantined }
