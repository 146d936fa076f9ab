-- Takes up to `limit` leases in one step: what is due is promoted, what ran out is taken back, then jobs
-- leave `wait`, and when that is empty `prioritized`. Each gets its lock, its start and its event.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] token  ARGV[3] worker id, a blank and its name if it has one  ARGV[4] limit  ARGV[5] lease_ms
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
-- The worker id, and after a blank its name if it has one.
local TOKEN, WORKER, NAME = ARGV[2], match(ARGV[3], '^(%S+) ?(.*)$')
NAME = NAME ~= '' and NAME or WORKER
local LIMIT, LEASE_S = tonumber(ARGV[4]), ARGV[5]
local TOKEN_H = ARGV[9]
local LEASE_UNTIL = text[NOW + tonumber(LEASE_S)]
-- The word tells settle-16.lua that the job is plain: it has no history, parent or deduplication.
local PLAIN, OTHER = ' active ' .. LEASE_UNTIL .. ' ', ' running ' .. LEASE_UNTIL .. ' '

local leases, leases_n, started = {}, 0, {}
local counted_starts = 0
-- B-54: a job that lost its worker this often may be what kills its workers. A worker runs one such suspect at
-- a time; every other slot goes on with other jobs.
local SUSPECT_FROM, PASSED_MAX = 2, 100
local may_suspect = ARGV[10] == '1'
local passed_n = 0

-- The job's hash as a table; nil and the reason when the key is no hash.
local function read(key)
  local flat = redis.pcall('HGETALL', key)
  if flat.err then
    return nil, 'its key is a ' .. call('TYPE', key).ok .. ', not a hash'
  end
  local f = {}
  for i = 1, #flat, 2 do
    f[flat[i]] = flat[i + 1]
  end
  return f
end

local function lend(id, f, ats)
  leases_n = leases_n + 1
  local row = { id, f.name, f.data or 'null', f.opts or '{}', ats, f.timestamp or '0', f.priority or '0' }
  if f.atm or f.stc or f.rjk or f.defa then
    row[8], row[9], row[10] = f.atm or '0', f.stc or '0', f.stacktrace or ''
    row[11], row[12] = f.rjk or '', f.defa or ''
  end
  leases[leases_n] = row
end

-- What few records need is made only when one does.
local function rarely()
  -- Why a record that cannot start cannot; nil when there is none (it was removed while it waited).
  local function unreadable(id, f, reason)
    if not f then
      return reason
    elseif next(f) and not f.name then
      return 'its hash has no name'
    elseif next(f) then
      return 'its id is not UTF-8'
    end
  end

  -- Ids are text to every client of BullMQ.
  local function is_text(id)
    local at, size = 1, #id
    while at <= size do
      local rest = match(id, '^[%z\1-\127]+()', at)
        or match(id, '^[\194-\223][\128-\191]()', at)
        or match(id, '^\224[\160-\191][\128-\191]()', at)
        or match(id, '^\237[\128-\159][\128-\191]()', at)
        or match(id, '^[\225-\236\238\239][\128-\191][\128-\191]()', at)
        or match(id, '^\240[\144-\191][\128-\191][\128-\191]()', at)
        or match(id, '^[\241-\243][\128-\191][\128-\191][\128-\191]()', at)
        or match(id, '^\244[\128-\143][\128-\191][\128-\191]()', at)
      if not rest then
        return false
      end
      at = rest
    end
    return true
  end

  -- Counters that are no whole numbers: they are removed, and the job carries their values as its failure, which
  -- ends it at this pickup as any other decided failure.
  local function condemn(key, f)
    for _, field in ipairs({ 'ats', 'atm', 'stc' }) do
      if f[field] and not whole(f[field]) then
        local value = string.gsub(f[field]:sub(1, 64), '[%c\128-\255]', '?')
        f.defa = 'The record cannot be read: the field ' .. field .. " holds '" .. value .. "', not a whole number"
        call('HDEL', key, field)
        f[field] = nil
      end
    end
    call('HSET', key, 'defa', f.defa)
  end
  return unreadable, is_text, condemn
end

-- Starts a job that was just taken: its lock, its event, its hash, its journal event, its lease.
-- False, and nothing done, for a suspect that has to wait because this worker runs one already.
local function start(id, from_list)
  local key = PREFIX .. id
  local f, reason = read(key)
  local name = f and f.name
  local shown = id
  if not name or find(id, '[%c\128-\255]') then
    local unreadable, is_text = rarely()
    if not name or not is_text(id) then
      reason = unreadable(id, f, reason)
      if reason then
        quarantine(id, reason)
      end
      return true
    end
    shown = string.gsub(id, '%c', ' ')
  end
  if f.ats or f.atm or f.stc then
    if not (whole(f.ats or '0') and whole(f.atm or '0') and whole(f.stc or '0')) then
      local _, _, condemn = rarely()
      condemn(key, f)
    elseif f.stc and not f.defa and tonumber(f.stc) >= SUSPECT_FROM then
      if not may_suspect then
        return false
      end
      may_suspect = false
    end
  end
  local was_fence = f.ats or '0'
  local ats = was_fence == '0' and '1' or text[was_fence + 1]
  local ver, from, was_lease, old_fence, old_kind, old_due = read_tn(f.tn)
  if f.priority ~= '0' and f.priority and not whole(f.priority) then
    f.priority = '0'
  end
  local priority = f.priority or '0'
  if find(name, '%c') then
    name = string.gsub(name, '%c', ' ')
  end
  if ver == 0 then -- another program stored it: its history begins with what it left
    ver, from = 1, from_list
    lines[lines_n + 1] = 'e'
    lines_n = lines_n + 2
    lines[lines_n] = shown .. '\tsubmit\t1\t' .. (whole(f.timestamp) and f.timestamp or NOW_S) .. '\t' .. name
      .. '\t\t' .. from .. '\t0\t' .. was_fence .. '\t0\t0\t0\t\t0\t0\t\t\t\t\t' .. priority
      .. '\tseen at its first claim'
  elseif from ~= 'delayed' then -- due jobs are promoted without an event of their own
    from = from_list
  end
  ver = ver == 1 and '2' or text[ver + 1]
  local is_plain = not (f.atm or f.stc or f.deid or f.parentKey)
  call('SET', key .. ':lock', TOKEN .. ':' .. ats, 'PX', LEASE_S)
  redis.pcall('XADD', EVENTS, '*', 'event', 'active', 'jobId', id, 'prev', 'waiting', 'timestamp', NOW_S,
    'workerId', WORKER)
  call('HSET', key, 'processedOn', NOW_S, 'ats', ats, 'pb', NAME, 'workerId', WORKER, 'tn',
    ver .. (is_plain and PLAIN or OTHER) .. old_fence .. ' ' .. old_kind .. ' ' .. old_due)
  local attempt = (f.atm or f.stc) and text[(f.atm or 0) + (f.stc or 0) + 1] or '1'
  lines[lines_n + 1] = 'e'
  lines_n = lines_n + 2
  lines[lines_n] = shown .. '\tclaim\t' .. ver .. '\t' .. NOW_S .. '\t' .. name .. '\t' .. from
    .. '\tactive\t' .. attempt .. '\t' .. ats .. '\t' .. was_fence .. '\t' .. LEASE_UNTIL .. '\t'
    .. was_lease .. '\t' .. WORKER .. '\t0\t0\t\t\t\t' .. TOKEN_H .. '\t' .. priority .. '\t'
  if not f.defa then -- B-17: its worker fails it at once; no start for the rate limiter
    counted_starts = counted_starts + 1
  end
  started[#started + 1] = id
  lend(id, f, ats)
  return true
end

-- Takes jobs off `wait`; suspects that have to wait keep their places. Many of them go to the end of the list
-- instead, so that looking past them stays cheap.
local function take_from_wait(wanted)
  local passed, empty = {}, false
  while leases_n < wanted and not empty and #passed < PASSED_MAX do
    local asked = wanted - leases_n
    local ids = call('RPOP', WAIT, text[asked]) or {}
    for _, id in ipairs(ids) do
      if not start(id, 'waiting') then
        passed[#passed + 1] = id
      end
    end
    empty = #ids < asked
  end
  if #passed >= PASSED_MAX then
    call('LPUSH', WAIT, unpack(passed))
  else
    for i = #passed, 1, -1 do
      call('RPUSH', WAIT, passed[i])
    end
  end
  passed_n = passed_n + #passed
  return empty
end

local function take_from_prioritized(wanted)
  local passed = {}
  while leases_n < wanted and #passed < 2 * PASSED_MAX do
    local popped = redis.pcall('ZPOPMIN', PRIORITIZED, text[wanted - leases_n]) -- of another type: upkeep mends it
    if #popped == 0 then
      if #passed == 0 then
        call('DEL', PC)
      end
      break
    end
    for at = 1, #popped, 2 do
      if not start(popped[at], 'prioritized') then
        passed[#passed + 1], passed[#passed + 2] = popped[at + 1], popped[at]
      end
    end
  end
  if #passed > 0 then
    call('ZADD', PRIORITIZED, unpack(passed))
  end
  passed_n = passed_n + #passed / 2
end

-- Takes up to `wanted` jobs that are claimable.
local function take_jobs(wanted)
  if leases_n < wanted and take_from_wait(wanted) then
    take_from_prioritized(wanted)
  end
end

local function rare()
  -- @include waiting
  -- @include reap
  return { promote = promote, reap_lockless = reap_lockless }
end

-- The due time of the first delayed job; 0 when there is none.
local function next_due()
  local first = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
  return first[2] and math.floor(math.min(first[2], NEVER) / SLOTS) or 0, first[2]
end

-- Most claims only take jobs: the key types that this needs are proved by the commands themselves, `wait` first.
local due, is_delayed = next_due()
local is_due = is_delayed and due <= NOW
if is_due or ARGV[11] == '1' or ARGV[12] == '1' then
  prove()
end
-- B-12: what is due becomes claimable before anything is taken.
if is_due then
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
        note({ id = id, kind = 'extend', ver = ver, task = f.name, from = 'active', to = 'active',
          attempt = text[(whole(f.atm) or 0) + (whole(f.stc) or 0) + 1], fence = f.ats, lease = LEASE_UNTIL,
          prev_lease = was_lease, worker = WORKER, token_h = TOKEN_H, priority = f.priority })
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
take_jobs(wanted)
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
local state = limited_ms > 0 and 'limited' or passed_n > 0 and 'held' or 'ok'
return { state, NOW, (next_due()), limited_ms, '', leases, quarantined }
