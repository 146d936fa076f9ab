-- Takes up to `limit` leases in one step. It promotes jobs that are due and reclaims jobs whose lock ran out. Then it
-- takes jobs from `wait`, and from `prioritized` when `wait` is empty. Each job gets its lock, its start and its event.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] token  ARGV[3] worker id, followed by a blank and the worker's name if it has one
-- ARGV[4] limit  ARGV[5] lease_ms  ARGV[6] how often the lease of a job may run out
-- ARGV[7] limiter max ('' for none)  ARGV[8] limiter ms  ARGV[9] hash of the token
-- ARGV[10] 1 if the worker runs no suspect  ARGV[11] 1 to look for locks that ran out  ARGV[12] 1 after a lost reply
-- ARGV[13..] after a lost reply: ids of the jobs that this worker knows it holds
-- Returns { state, now_ms, next due_ms, ms to wait for the rate limiter, last event id, leases, quarantined };
--   state is 'ok', 'paused', 'limited' or 'held' (only suspects wait, and the worker runs one); a lease is
--   { id, name, data, opts, ats, timestamp, priority }, and for a job with a history { ..., atm, stc,
--   stacktrace, scheduler, deferred failure }; quarantined has { id, reason } of each record that was set aside
-- Clauses B-8 B-9 B-10 B-11 B-12 B-13 B-14 B-15 B-16 B-17 B-24 B-31 B-54
-- @include queue

-- Most claims only take jobs. These functions are defined when a claim does more.
local function upkeep_functions()
  -- @include step
  -- @include enqueue
  -- @include reap
  return { check_types = check_types, promote = promote, reap_lockless = reap_lockless, note = note }
end

local TOKEN, WORKER, NAME = ARGV[2], match(ARGV[3], '^(%S+) ?(.*)$')
NAME = NAME ~= '' and NAME or WORKER
local LIMIT, LEASE_S, STALLED_MAX = tonumber(ARGV[4]), ARGV[5], tonumber(ARGV[6])
local TOKEN_H = ARGV[9]
local MUST_REAP, MUST_RECOVER = ARGV[11] == '1', ARGV[12] == '1'
local LEASE_UNTIL = text[NOW + tonumber(LEASE_S)]
-- `active` tells settle-16.lua that the job is plain: it has no history, parent or deduplication.
local PLAIN, OTHER = ' active ' .. LEASE_UNTIL .. ' ', ' running ' .. LEASE_UNTIL .. ' '

local leases, leases_n, started_ids = {}, 0, {}
local limiter_starts = 0 -- starts that the rate limiter counts
-- B-54: a job that lost its worker this often is a suspect: it may be what kills its workers. A worker runs one suspect
-- at a time and other jobs in its other slots.
local SUSPECT_FROM, SKIPPED_MAX = 2, 100
local may_run_suspect = ARGV[10] == '1'
local skipped_n = 0

-- The job's hash as a table; nil and the reason if the key is not a hash.
local function read_hash(key)
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

local function add_lease(id, f, ats)
  leases_n = leases_n + 1
  local row = { id, f.name, f.data or 'null', f.opts or '{}', ats, f.timestamp or '0', f.priority or '0' }
  if f.atm or f.stc or f.rjk or f.defa then
    row[8], row[9], row[10] = f.atm or '0', f.stc or '0', f.stacktrace or ''
    row[11], row[12] = f.rjk or '', f.defa or ''
  end
  leases[leases_n] = row
end

-- B-55: functions for records that few queues have. A script pays for every function that it defines, so these are
-- defined when the first such record is found.
local function bad_record_functions()
  -- Why the job cannot start; nil if there is no record, because it was removed while it waited.
  local function unreadable(id, f, reason)
    if not f then
      return reason
    elseif next(f) and not f.name then
      return 'its hash has no name'
    elseif next(f) then
      return 'its id is not UTF-8'
    end
  end

  -- Whether the id is UTF-8, which every client of BullMQ expects.
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

  -- Removes counters that are not whole numbers. Their values become the job's deferred failure, which ends the job at
  -- this pickup (B-17).
  local function defer_failure(key, f)
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
  return unreadable, is_text, defer_failure
end

-- Starts a job that was just popped: lock, event, hash, journal event, lease. Returns false and changes nothing if the
-- job is a suspect and this worker runs one already.
local function start(id, from_list)
  local key = PREFIX .. id
  local f, reason = read_hash(key)
  local name = f and f.name
  local shown = id
  if not name or find(id, '[%c\128-\255]') then
    local unreadable, is_text = bad_record_functions()
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
      local _, _, defer_failure = bad_record_functions()
      defer_failure(key, f)
    elseif f.stc and not f.defa and tonumber(f.stc) >= SUSPECT_FROM then
      if not may_run_suspect then
        return false
      end
      may_run_suspect = false
    end
  end
  local was_fence = f.ats or '0'
  local ats = was_fence == '0' and '1' or text[was_fence + 1]
  local ver, from, was_lease, settled = read_tn(f.tn)
  if f.priority ~= '0' and f.priority and not whole(f.priority) then
    f.priority = '0'
  end
  local priority = f.priority or '0'
  if find(name, '%c') then
    name = string.gsub(name, '%c', ' ')
  end
  if ver == 0 then -- another client added the job: its history begins with what that client wrote
    ver, from = 1, from_list
    add_line(shown, '\tsubmit\t1\t' .. (whole(f.timestamp) and f.timestamp or NOW_S) .. '\t' .. name
      .. '\t\t' .. from .. '\t0\t' .. was_fence .. '\t0\t0\t0\t\t0\t0\t\t\t\t\t' .. priority
      .. '\tseen at its first claim')
  elseif from ~= 'delayed' then -- a promotion writes no journal event
    from = from_list
  end
  ver = ver == 1 and '2' or text[ver + 1]
  local is_plain = not (f.atm or f.stc or f.deid or f.parentKey)
  call('SET', key .. ':lock', TOKEN .. ':' .. ats, 'PX', LEASE_S)
  redis.pcall('XADD', EVENTS, '*', 'event', 'active', 'jobId', id, 'prev', 'waiting', 'timestamp', NOW_S,
    'workerId', WORKER)
  call('HSET', key, 'processedOn', NOW_S, 'ats', ats, 'pb', NAME, 'workerId', WORKER, 'tn',
    ver .. (is_plain and PLAIN or OTHER) .. settled)
  local attempt = (f.atm or f.stc) and text[(f.atm or 0) + (f.stc or 0) + 1] or '1'
  add_line(shown, '\tclaim\t' .. ver .. '\t' .. NOW_S .. '\t' .. name .. '\t' .. from .. '\tactive\t' .. attempt
    .. '\t' .. ats .. '\t' .. was_fence .. '\t' .. LEASE_UNTIL .. '\t' .. was_lease .. '\t' .. WORKER
    .. '\t0\t0\t\t\t\t' .. TOKEN_H .. '\t' .. priority .. '\t')
  if not f.defa then -- B-17: the worker fails the job at once, so the rate limiter does not count the start
    limiter_starts = limiter_starts + 1
  end
  started_ids[#started_ids + 1] = id
  add_lease(id, f, ats)
  return true
end

-- Takes jobs from `wait` until there are `target` leases; returns whether the list is empty. Suspects that this worker
-- may not run keep their places. If there are many, they go to the end of the list, so that the next claim need not
-- skip them again.
local function take_from_wait(target)
  local skipped, empty = {}, false
  while leases_n < target and not empty and #skipped < SKIPPED_MAX do
    local count = target - leases_n
    local ids = call('RPOP', WAIT, text[count]) or {}
    for _, id in ipairs(ids) do
      if not start(id, 'waiting') then
        skipped[#skipped + 1] = id
      end
    end
    empty = #ids < count
  end
  if #skipped >= SKIPPED_MAX then
    call('LPUSH', WAIT, unpack(skipped))
  else
    for i = #skipped, 1, -1 do
      call('RPUSH', WAIT, skipped[i])
    end
  end
  skipped_n = skipped_n + #skipped
  return empty
end

local function take_from_prioritized(target)
  local skipped = {} -- score, id, score, id, ...
  while leases_n < target and #skipped < 2 * SKIPPED_MAX do
    local popped = redis.pcall('ZPOPMIN', PRIORITIZED, text[target - leases_n]) -- upkeep mends a key of another type
    if #popped == 0 then
      if #skipped == 0 then
        call('DEL', PC)
      end
      break
    end
    for at = 1, #popped, 2 do
      if not start(popped[at], 'prioritized') then
        skipped[#skipped + 1], skipped[#skipped + 2] = popped[at + 1], popped[at]
      end
    end
  end
  if #skipped > 0 then
    call('ZADD', PRIORITIZED, unpack(skipped))
  end
  skipped_n = skipped_n + #skipped / 2
end

-- The due time of the first delayed job, and its score; 0 if there is none.
local function next_due()
  local first = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
  return first[2] and math.floor(math.min(first[2], NEVER) / SLOTS) or 0, first[2]
end

-- A claim that only takes jobs needs no check of key types: ZRANGE on `delayed` and RPOP on `wait` raise before
-- anything is written, and a write to `active` goes through put().
local due, score = next_due()
local is_due = score and due <= NOW
local upkeep
if is_due or MUST_REAP or MUST_RECOVER then
  upkeep = upkeep_functions()
  upkeep.check_types()
end
if is_due then -- B-12
  upkeep.promote()
end
-- B-24: the reply to an earlier claim was lost. What that claim took is handed out again under the same fence.
if MUST_RECOVER then
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
      local f = read_hash(key)
      if f and f.name and whole(f.ats) and lock == TOKEN .. ':' .. f.ats then
        f.atm, f.stc = whole(f.atm) and f.atm, whole(f.stc) and f.stc
        f.priority = whole(f.priority) and f.priority
        local ver, _, was_lease, settled = read_tn(f.tn)
        ver = text[ver + 1]
        call('SET', key .. ':lock', lock, 'PX', LEASE_S)
        call('HSET', key, 'tn', ver .. OTHER .. settled)
        upkeep.note({ id = id, kind = 'extend', ver = ver, task = f.name, from = 'active', to = 'active',
          attempt = text[(whole(f.atm) or 0) + (whole(f.stc) or 0) + 1], fence = f.ats, lease = LEASE_UNTIL,
          prev_lease = was_lease, worker = WORKER, token_h = TOKEN_H, priority = f.priority })
        add_lease(id, f, f.ats)
      end
    end
  end
end
if MUST_REAP then
  upkeep.reap_lockless(STALLED_MAX)
end

-- B-14, B-15: how many jobs may start by the queue's own limits, and how long to wait if none may.
local allowed, limited_ms = IS_PAUSED and 0 or LIMIT - leases_n, 0
if CONCURRENCY and allowed > 0 then
  allowed = math.min(allowed, CONCURRENCY - call('LLEN', ACTIVE))
end
local limit_max = whole(settings[3]) or tonumber(ARGV[7])
if limit_max and allowed > 0 then
  local used = redis.pcall('GET', LIMITER)
  used = whole(type(used) == 'table' and '' or used or '0')
  if not used then -- not a count: start anew
    call('DEL', LIMITER)
    used = 0
  end
  local left_ms = used >= limit_max and call('PTTL', LIMITER) or 0
  if left_ms < 0 then -- a count without an expiry would stop the queue for ever
    call('DEL', LIMITER)
    used = 0
  end
  if used >= limit_max then
    allowed, limited_ms = 0, math.max(1, left_ms)
  else
    allowed = math.min(allowed, limit_max - used)
  end
end

local target = leases_n + allowed
if leases_n < target and take_from_wait(target) then -- B-11: `wait` first
  take_from_prioritized(target)
end
if #started_ids > 0 then
  each_many('LPUSH', ACTIVE, started_ids)
  if leases_n >= target or skipped_n > 0 then
    wake() -- there may be more jobs for another worker
  end
  local limit_ms = tonumber(ARGV[8]) or whole(settings[4])
  if limit_max and limit_ms and limiter_starts > 0
    and call('INCRBY', LIMITER, text[limiter_starts]) == limiter_starts then
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
local state = limited_ms > 0 and 'limited' or skipped_n > 0 and 'held' or 'ok'
return { state, NOW, (next_due()), limited_ms, '', leases, quarantined }
