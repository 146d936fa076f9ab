-- Takes up to `limit` leases: promotes due jobs, takes back expired leases, then reads new entries through the
-- consumer group. Each claimed job is marked running in the same step.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] worker id (the consumer)  ARGV[3] limit  ARGV[4] lease_ms
-- ARGV[5] how often a lease may expire  ARGV[6] 1 after a lost answer
-- ARGV[7] for how long a foreign worker may be silent, in ms
-- ARGV[8] instance of the worker  ARGV[9] number of this claim, rising within the instance
-- ARGV[10..] after a lost answer: the entries that this worker knows it holds
-- Returns { state, now_ms, last stream id ('': claim again at once), last wake id ('': unchanged), next due_ms
--   (0: none), leases, quarantined records as job_id, reason, ... }. The two ids are where a waiting worker blocks.
--   state is 'ok', 'paused' or 'late' (a later claim was executed first). Leases are grouped by what they share:
--   { task, lease fields, ttl_s, { job_id, payload, entry fields, ... } }; of the entry fields only msg_id if the job
--   is as old as its entry and has no trace
-- Clauses S-8 S-9 S-10 S-11 S-12 S-13 S-18 S-19 S-27 S-28
-- @include step
local WORKER = ARGV[2]
local LIMIT = tonumber(ARGV[3])
local LEASE_UNTIL = NOW + ARGV[4]
local LEASE_UNTIL_S = format('%d', LEASE_UNTIL)

local groups = {}
local rows, rows_n -- of the last group
local last_task, last_lease, last_ttl_s
local leases_n = 0
local suspect = '-' -- the suspect that this worker runs
local more_idle = false -- the search for expired leases stopped before its end

-- The leases that follow have this in common.
local function begin_group(task, lease, ttl_s)
  if lease ~= last_lease or task ~= last_task or ttl_s ~= last_ttl_s then
    rows, rows_n = {}, 0
    groups[#groups + 1] = { task, lease, ttl_s or '', rows }
    last_task, last_lease, last_ttl_s = task, lease, ttl_s
  end
end

local function add_lease(id, payload, entry)
  rows[rows_n + 1], rows[rows_n + 2], rows[rows_n + 3] = id, payload, entry
  rows_n, leases_n = rows_n + 3, leases_n + 1
end

local general_path

-- Most claims do not need the general path, so its functions are defined when they are first needed.
local function general()
  if not general_path then
    local function make()
      -- @include take
    end
    general_path = make()
  end
  return general_path
end

-- Most new entries are of jobs that nothing happened to since they were submitted, and their lease field shows it. Such
-- jobs need not be parsed, and what is written for one is written for all that have the same task, lease field and time
-- to live. Without this path throughput falls to 72 %, and the median latency is 1.4 times, the CPU time of Redis 1.3
-- times as high (2026-11-18).
local FRESH = '^0 1 0 (%d+) 0 0 %-$'
local EVENT_DATA = '{"attempt":1,"worker":"' .. WORKER .. '"}'
local fresh_task, fresh_lease, fresh_ttl_s -- of the last fresh job
local fresh_after, fresh_tail, fresh_expires -- its new lease field, its journal line without the id, its expiry

local function begin_fresh(task, lease, ttl_s)
  local max_attempts = lease and match(lease, FRESH)
  if not max_attempts or string.find(task, '%c') then
    return false
  end
  fresh_task, fresh_lease, fresh_ttl_s = task, lease, ttl_s
  fresh_after = '1 2 1 ' .. max_attempts .. ' 0 ' .. LEASE_UNTIL_S .. ' ' .. WORKER
  fresh_tail = '\tclaim\t2\t' .. NOW_S .. '\t' .. task .. '\tqueued\trunning\t1\t1\t0\t' .. LEASE_UNTIL_S
    .. '\t0\t' .. WORKER .. '\t' .. max_attempts
  fresh_expires = ttl_s and expires_at(ttl_s, LEASE_UNTIL)
  begin_group(task, fresh_after, ttl_s)
  return true
end

-- Leases the job of a new entry if it is fresh; returns false if not. This loop is most of what a busy server does, so
-- its steps are written in place and not as functions.
local function take_fresh(msg_id, flat)
  local id, task = flat[2], flat[4]
  if flat[1] ~= 'job_id' or flat[3] ~= 'task' or flat[5] ~= 'payload' or string.find(id, '[%c\128-\255]') then
    return false
  end
  local key = JOB .. id
  local v = pcall('HMGET', key, 'status', 'lease', 'ttl_s')
  local is_alike = task == fresh_task and v[2] == fresh_lease and v[3] == fresh_ttl_s
  if v[1] ~= 'queued' or #id > 256 or not (is_alike or begin_fresh(task, v[2], v[3])) then
    return false
  end
  local events = key .. ':events'
  call('HSET', key, 'status', 'running', 'updated_ts', NOW_S, 'lease', fresh_after)
  local added = pcall('XADD', events, '*', 'type', 'running', 'ts', NOW_S, 'step', 'worker.start', 'data', EVENT_DATA)
  if added.err then
    quarantine().emit_anew(key, added.err, '*', 'type', 'running', 'ts', NOW_S, 'step', 'worker.start', 'data',
      EVENT_DATA)
  end
  if fresh_expires then
    call('PEXPIREAT', key, fresh_expires)
    call('PEXPIREAT', events, fresh_expires)
  end
  add_line(id, fresh_tail)
  add_lease(id, flat[6], msg_id)
  return true
end

-- The next due time, or 0 if there is none. It is limited, because another program may have written any score.
local function next_due()
  local due = own('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')[2]
  if due and tonumber(due) <= NOW then
    general().promote('1000')
    due = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')[2]
  end
  return due and format('%d', math.max(NOW, math.min(tonumber(due), NOW + 86400000))) or '0'
end

-- Takes new entries. Returns the id of the last one if there are no more, else ''.
local function take_new()
  local count_max = LIMIT - leases_n
  local reply = pcall('XREADGROUP', 'GROUP', GROUP, WORKER, 'COUNT', count_max, 'STREAMS', STREAM, '>')
  if reply and reply.err then
    general().ensure_group()
    reply = call('XREADGROUP', 'GROUP', GROUP, WORKER, 'COUNT', count_max, 'STREAMS', STREAM, '>')
  end
  local entries = reply and reply[1][2] or {}
  for i = 1, #entries do
    local msg_id, flat = entries[i][1], entries[i][2]
    if not take_fresh(msg_id, flat) then
      fresh_task = nil -- the general path may begin another group
      general().take(msg_id, flat, false)
    end
  end
  if #entries == count_max then
    return ''
  end
  return entries[1] and entries[#entries][1] or '0-0'
end

-- The latest claim of this worker, the suspect it runs, and its slots. If a later claim was executed first, the worker
-- no longer waits for this answer, and would not know of its leases (S-28).
local instance, number, last_suspect, slots = match(own('HGET', WORKERS, WORKER) or '',
  '^%d+ (%S+) (%d+) (%S+)( ?%d*)$')
if instance == ARGV[8] and tonumber(number) >= tonumber(ARGV[9]) then
  return { 'late', NOW, '', '', '0', {}, {} }
end
if last_suspect and last_suspect ~= '-' and general().still_runs(last_suspect) then
  suspect = last_suspect
end

local state = is_paused() and 'paused' or 'ok'
local last_id = '' -- of the stream, set if no new entry is left
local due = '0'

if state == 'ok' then
  due = next_due()
  if ARGV[6] == '1' then
    general().recover()
  end
  local search_at = tonumber(own('HGET', UPKEEP, 'search_at')) or 0
  if not (NOW < search_at and search_at <= NOW + 1000) then
    general().take_expired()
  end
end
while state == 'ok' and last_id == '' and leases_n < LIMIT do
  last_id = take_new()
end

call('HSET', WORKERS, WORKER, NOW_S .. ' ' .. ARGV[8] .. ' ' .. ARGV[9] .. ' ' .. suspect .. (slots or ''))
-- A waiting worker blocks on the stream and on jobs:wake from these ids on, so it misses nothing that is added after
-- this moment. `last_id` stays '' while there may be more to take at once. With leases the wake id is not read: at
-- worst the worker is woken once for nothing.
local wake_id = ''
if leases_n > 0 then
  own('HINCRBY', STATS, 'started', format('%d', leases_n))
  last_id = not more_idle and last_id or ''
else -- by XREVRANGE, since XINFO costs three times as much
  local entry = pcall('XREVRANGE', STREAM, '+', '-', 'COUNT', '1')[1]
  local wake_entry = own('XREVRANGE', WAKE, '+', '-', 'COUNT', '1')[1]
  last_id, wake_id = entry and entry[1] or '0-0', wake_entry and wake_entry[1] or '0-0'
end
flush()
return { state, NOW, last_id, wake_id, due, groups, quarantined }
