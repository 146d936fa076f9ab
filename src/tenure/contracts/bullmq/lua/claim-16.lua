-- Takes up to `limit` leases in one step: what is due is promoted, what ran out is taken back, then jobs
-- leave `wait`, and when that is empty `prioritized`. Each gets its lock, its start and its event.
-- Most claims need less and go through take-16.lua; this script does everything.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] token  ARGV[3] worker id  ARGV[4] limit  ARGV[5] lease_ms
-- ARGV[6] how often a lease may run out  ARGV[7] limiter max ('' for none)  ARGV[8] limiter ms
-- ARGV[9] hash of the token  ARGV[10] 1 when the worker runs no suspect
-- ARGV[11] 1 to look for locks that ran out  ARGV[12] 1 after a lost answer
-- ARGV[13..] after a lost answer: ids this worker knows it holds
-- Returns { state, now_ms, next due_ms, ms to wait for the rate limiter, last event id, leases, quarantined };
--   state is 'ok', 'paused', 'limited' or 'held' (only suspects wait, and the worker runs one); a lease is
--   { id, name, data, opts, ats, timestamp, priority }, and for a job with a history { ..., atm, stc,
--   stacktrace, scheduler, the failure decided for it }; quarantined has { id, reason } of records set aside
-- Clauses B-8 B-9 B-10 B-11 B-12 B-13 B-14 B-15 B-16 B-17 B-24 B-31 B-54
-- @include queue
-- @include start

local function rare()
  -- @include waiting
  -- @include reap
  return { promote = promote, reap_lockless = reap_lockless }
end

-- @include prove
-- B-12: what is due stands in line before anything is taken.
local due_now = text[(NOW + 1) * SLOTS - 1]
if #call('ZRANGEBYSCORE', DELAYED, '-inf', due_now, 'LIMIT', '0', '1') > 0 then
  rare().promote()
end
-- B-24: the answer to an earlier claim was lost; what it took is handed out again, under the same fence.
if ARGV[12] == '1' then
  local held = {}
  for i = 13, #ARGV do
    held[ARGV[i]] = true
  end
  local ids = call('LRANGE', ACTIVE, '0', '-1')
  for i = #ids, 1, -1 do
    local id = ids[i]
    local key = PREFIX .. id
    local lock = leases_n < LIMIT and not held[id] and redis.pcall('GET', key .. ':lock')
    if type(lock) == 'string' and lock:sub(1, #TOKEN + 1) == TOKEN .. ':' then
      local f = read(key)
      if f and f.name and whole(f.ats) and lock == TOKEN .. ':' .. f.ats then
        f.atm, f.stc = whole(f.atm) and f.atm, whole(f.stc) and f.stc
        f.priority = whole(f.priority) and f.priority
        local ver, _, was_lease, old_fence, old_kind, old_due = read_tn(f.tn)
        ver = text[ver + 1]
        call('SET', key .. ':lock', lock, 'PX', LEASE_S)
        call('HSET', key, 'tn', ver .. OTHER .. old_fence .. ' ' .. old_kind .. ' ' .. old_due)
        note(plain(id), 'extend', ver, NOW_S, plain(f.name), 'active', 'active',
          text[(whole(f.atm) or 0) + (whole(f.stc) or 0) + 1], f.ats, f.ats, LEASE_UNTIL, was_lease, WORKER, '0', '0',
          '', '', '', TOKEN_H, f.priority)
        lend(id, f, f.ats)
      end
    end
  end
end
if ARGV[11] == '1' then
  rare().reap_lockless(tonumber(ARGV[6]))
end

-- How many may start by the queue's own limits, and how long to wait when none may.
local allowed, limited_ms = IS_PAUSED and 0 or LIMIT - leases_n, 0
if CONCURRENCY and allowed > 0 then
  allowed = math.min(allowed, CONCURRENCY - call('LLEN', ACTIVE))
end
local limit_max = whole(settings[3]) or tonumber(ARGV[7])
if limit_max and allowed > 0 then
  local used = redis.pcall('GET', LIMITER)
  used = whole(type(used) == 'table' and '' or used or '0')
  if not used then -- no count: it is begun anew
    call('DEL', LIMITER)
    used = 0
  end
  local left_ms = used >= limit_max and call('PTTL', LIMITER) or 0
  if left_ms < 0 then -- a count that never ends would stop the queue
    call('DEL', LIMITER)
    used = 0
  end
  if used >= limit_max then
    allowed, limited_ms = 0, math.max(1, left_ms)
  else
    allowed = math.min(allowed, limit_max - used)
  end
end

local wanted = leases_n + allowed
take_from_lines(wanted)
if #started > 0 then
  each_many('LPUSH', ACTIVE, started)
  if leases_n >= wanted or passed_n > 0 then
    wake() -- there may be more, for another worker
  end
  local limit_ms = tonumber(ARGV[8]) or whole(settings[4])
  if limit_max and limit_ms and counted_starts > 0
    and call('INCRBY', LIMITER, text[counted_starts]) == counted_starts then
    call('PEXPIRE', LIMITER, text[limit_ms])
  end
end
flush()
if leases_n > 0 then
  return { 'ok', NOW, 0, 0, '', leases, quarantined }
end
if IS_PAUSED then
  local last = call('XREVRANGE', EVENTS, '+', '-', 'COUNT', '1')[1]
  return { 'paused', NOW, 0, 0, last and last[1] or '0-0', leases, quarantined }
end
local first = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
local next_due = first[2] and math.floor(math.min(first[2], NEVER) / SLOTS) or 0
local state = limited_ms > 0 and 'limited' or passed_n > 0 and 'held' or 'ok'
return { state, NOW, next_due, limited_ms, '', leases, quarantined }
