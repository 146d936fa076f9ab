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
--   { task, lease fields, ttl_s, { job_id, payload, entry fields, ... } }
-- Clauses S-8 S-9 S-10 S-11 S-12 S-13 S-18 S-19 S-27 S-28
-- @include reap
local WORKER = ARGV[2]
local LIMIT = tonumber(ARGV[3])
local LEASE_MS = tonumber(ARGV[4])
local LEASE_UNTIL = NOW + LEASE_MS
local LOST_MAX = tonumber(ARGV[5])
local FOREIGN_MS = tonumber(ARGV[7])
-- How often all workers together search the pending list for expired leases.
local SEARCH_EVERY_MS = math.min(1000, math.floor(LEASE_MS / 4))
-- A job whose lease expired this often is a suspect: it may be killing its workers (S-13). A worker runs at most one
-- suspect at a time. If several jobs were running when a worker died, the next death shows which one is to blame.
local SUSPECT_FROM = 2

local groups = {}
local rows, rows_n -- of the last group
local last_task, last_lease, last_ttl_s
local leases_n = 0
local suspect = '-' -- the suspect that this worker runs
local more_idle = false -- the search for expired leases stopped before its end

local function add_lease(job, task, payload, lease, entry)
  if lease ~= last_lease or task ~= last_task or job.ttl_s ~= last_ttl_s then
    rows, rows_n = {}, 0
    groups[#groups + 1] = { task, lease, job.ttl_s or '', rows }
    last_task, last_lease, last_ttl_s = task, lease, job.ttl_s
  end
  rows[rows_n + 1], rows[rows_n + 2], rows[rows_n + 3] = job.id, payload, entry
  rows_n, leases_n = rows_n + 3, leases_n + 1
end

local function start(job, msg_id, task, payload)
  local was_fence, was_lease = text[job.fence], job.lease_until
  if job.ver == 0 then -- stored by another gateway, which does not write the index
    own('ZADD', INDEX, 'NX', job.created_ts, job.id)
  end
  job.fence, job.attempt, job.ver = job.fence + 1, job.attempt + 1, job.ver + 1
  job.lease_until, job.worker = text[LEASE_UNTIL], WORKER
  local lease, entry = lease_field(job), job.entry
  if job.msg_id == msg_id then
    call('HSET', job.key, 'status', 'running', 'updated_ts', NOW_S, 'lease', lease)
  else
    job.msg_id = msg_id
    entry = entry_field(job)
    call('HSET', job.key, 'status', 'running', 'updated_ts', NOW_S, 'lease', lease, 'entry', entry)
  end
  local data = '{"attempt":' .. text[job.attempt] .. ',"worker":"' .. WORKER .. '"}'
  emit(job.key, 'running', 'worker.start', data, job.ttl_s, LEASE_UNTIL)
  record(job, 'claim', task, 'queued', 'running', was_lease, WORKER, job.max_attempts, was_fence)
  add_lease(job, task, payload, lease, entry)
end

-- The answer with this lease was lost, so no worker ran the job: the attempt is not counted.
local function give_back(job, task)
  local was = job.lease_until
  job.ver, job.attempt, job.lease_until, job.status = job.ver + 1, job.attempt - 1, '0', 'queued'
  record(job, 'release', task, 'running', 'queued', was, WORKER)
end

-- Leases the job of an entry that was just delivered to this worker. The job may be in any state.
local function take(msg_id, flat, ours_unknown)
  local id, task, payload = fields_of(flat)
  local job, unreadable = read_job(id)
  if unreadable then
    return quarantine_job(id, msg_id, unreadable, flat)
  elseif not job then
    return expire(id, task, msg_id)
  end
  if FINAL[job.status] then -- S-18: a redelivered finished job is only acknowledged
    return drop_entry(msg_id)
  end
  if job.status == 'running' and ours_unknown and job.worker == WORKER then
    give_back(job, task)
  elseif job.status == 'running' then
    if tonumber(job.lease_until) > NOW then
      if job.msg_id ~= msg_id then -- the same job enqueued twice
        return drop_entry(msg_id)
      end
      -- The group was deleted and made again: give the entry back to the holder of the lease.
      return pcall('XCLAIM', STREAM, GROUP, job.worker, '0', msg_id, 'JUSTID')
    end
    if job.lease_until == '0' and silent_ms(job, NOW) < FOREIGN_MS then
      return -- a foreign worker runs it; the entry is checked again when it has been idle
    end
    if not reap(job, task, LOST_MAX) then
      return drop_entry(msg_id)
    end
  elseif job.msg_id ~= '-' and job.msg_id ~= msg_id and has_entry(job.msg_id) then -- superseded
    return drop_entry(msg_id)
  end
  start(job, msg_id, task, payload)
end

-- Takes a pending entry over from any consumer. If the entry was deleted, it is only acknowledged.
local function take_over(msg_id, ours_unknown)
  local claimed = call('XCLAIM', STREAM, GROUP, WORKER, '0', msg_id)
  if claimed[1] and claimed[1][2] then
    take(msg_id, claimed[1][2], ours_unknown)
  else
    call('XACK', STREAM, GROUP, msg_id)
  end
end

-- Takes one idle entry if its lease has expired. A second suspect waits for another worker or a later claim.
local function take_idle(msg_id, consumer, idle_ms)
  local entry = call('XRANGE', STREAM, msg_id, msg_id)[1]
  local job = entry and read_job((fields_of(entry[2])))
  if job and is_held(job, consumer, idle_ms, FOREIGN_MS) then
    return
  end
  local is_suspect = job and tonumber(job.lost) + (job.status == 'running' and 1 or 0) >= SUSPECT_FROM
  if is_suspect and suspect ~= '-' then
    return
  end
  local before = leases_n
  take_over(msg_id, false)
  if is_suspect and leases_n > before then
    suspect = job.id
  end
end

-- Takes entries whose leases have expired.
local function take_expired()
  ensure_group()
  each_idle('claim_from', ARGV[4], function(msg_id, consumer, idle_ms)
    more_idle = leases_n >= LIMIT
    if not more_idle then
      take_idle(msg_id, consumer, idle_ms)
    end
    return not more_idle
  end)
  own('HSET', UPKEEP, 'search_at', more_idle and '0' or text[NOW + SEARCH_EVERY_MS])
end

-- S-28: the answer to an earlier claim was lost. Its leases are handed out again.
local function recover()
  local held = {}
  for i = 10, #ARGV do
    held[ARGV[i]] = true
  end
  ensure_group()
  for _, entry in ipairs(call('XPENDING', STREAM, GROUP, '-', '+', '1000', WORKER)) do
    if leases_n < LIMIT and not held[entry[1]] then
      take_over(entry[1], true)
    end
  end
end

local function still_runs(id)
  local job = read_job(id)
  return job and job.status == 'running' and job.worker == WORKER and tonumber(job.lease_until) > NOW
end

-- The next due time, or 0 if there is none. It is limited, because another program may have written any score.
local function next_due()
  local due = own('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')[2]
  if due and tonumber(due) <= NOW then
    promote('1000')
    due = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')[2]
  end
  return due and text[math.max(NOW, math.min(tonumber(due), NOW + 86400000))] or '0'
end

-- Takes new entries. Returns the id of the last one if there are no more, else ''.
local function take_new()
  local count_max = LIMIT - leases_n
  local reply = pcall('XREADGROUP', 'GROUP', GROUP, WORKER, 'COUNT', count_max, 'STREAMS', STREAM, '>')
  if reply and reply.err then
    ensure_group()
    reply = call('XREADGROUP', 'GROUP', GROUP, WORKER, 'COUNT', count_max, 'STREAMS', STREAM, '>')
  end
  local entries = reply and reply[1][2] or {}
  for i = 1, #entries do
    take(entries[i][1], entries[i][2], false)
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
if last_suspect and last_suspect ~= '-' and still_runs(last_suspect) then
  suspect = last_suspect
end

local state = is_paused() and 'paused' or 'ok'
local last_id = '' -- of the stream, set if no new entry is left
local due = '0'

if state == 'ok' then
  due = next_due()
  if ARGV[6] == '1' then
    recover()
  end
  local search_at = tonumber(own('HGET', UPKEEP, 'search_at')) or 0
  if not (NOW < search_at and search_at <= NOW + 1000) then
    take_expired()
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
  own('HINCRBY', STATS, 'started', text[leases_n])
  last_id = not more_idle and last_id or ''
else -- by XREVRANGE, since XINFO costs three times as much
  local entry = pcall('XREVRANGE', STREAM, '+', '-', 'COUNT', '1')[1]
  local wake_entry = own('XREVRANGE', WAKE, '+', '-', 'COUNT', '1')[1]
  last_id, wake_id = entry and entry[1] or '0-0', wake_entry and wake_entry[1] or '0-0'
end
flush()
return { state, NOW, last_id, wake_id, due, groups, quarantined }
