-- Takes up to `limit` leases: what is due is promoted, what ran out is taken back, then new entries
-- are read through the consumer group. Each claimed job is marked running in the same step.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] worker id (the consumer)  ARGV[3] limit  ARGV[4] lease_ms
-- ARGV[5] how often a lease may run out  ARGV[6] 1 after a lost answer
-- ARGV[7] for how long a holder of another make may be silent, in ms
-- ARGV[8] which instance of the worker asks  ARGV[9] the number of this claim, rising within it
-- ARGV[10..] after a lost answer: the entries this worker knows it holds
-- Returns { state, now_ms, where to listen on the stream ('': claim again at once), where to listen for
--   calls ('' with leases: as before), next due_ms (0: none), leases, what was set aside as job_id, reason,
--   job_id, reason ... }; state is 'ok', 'paused' or
--   'late' (a later claim came first); leases are lists of those that have much in common: { task, lease
--   words, ttl_s, { job_id, payload, entry words, ... } }; of an entry that is as it was submitted only
--   the id is told: its job was created then and is part of no trace
-- Clauses S-8 S-9 S-10 S-11 S-12 S-13 S-18 S-19 S-27 S-28
-- @include step
-- @include paused
local WORKER = ARGV[2]
local LIMIT = tonumber(ARGV[3])
local LEASE_UNTIL = format('%d', NOW + ARGV[4])

local groups = {}
local rows, rows_n -- of the last group
local last_task, last_lease, last_ttl_s
local leases_n = 0
local suspect = '-' -- the job that this worker runs as the only one of its kind (S-13)
local more_idle = false -- the search for what ran out stopped before its end

-- What is put into `rows` from here on has this in common.
local function begin_rows(task, lease, ttl_s)
  if lease ~= last_lease or task ~= last_task or ttl_s ~= last_ttl_s then
    rows, rows_n = {}, 0
    groups[#groups + 1] = { task, lease, ttl_s or '', rows }
    last_task, last_lease, last_ttl_s = task, lease, ttl_s
  end
end

local rest

-- What most claims do not need; made when it is first asked for.
local function uncommon()
  if rest then
    return rest
  end
  -- @include job
  -- @include end
  -- @include promote
  -- @include reap
  local LEASE_MS = tonumber(ARGV[4])
  local LOST_MAX = tonumber(ARGV[5])
  -- How often, over all workers together, the pending list is searched for leases that ran out.
  local SEARCH_EVERY_MS = math.min(1000, math.floor(LEASE_MS / 4))
  local FOREIGN_MS = tonumber(ARGV[7])
  -- A job that lost its worker this often is a suspect. A worker runs one suspect at a time, in one of its
  -- slots: if several of them died together, the next death shows which one it was.
  local SUSPECT_FROM = 2

  local function start(job, msg_id, task, payload)
    local was_fence, was_lease = text[job.fence], job.lease_until
    if job.ver == 0 then -- stored by a gateway that does not know the index
      own('ZADD', INDEX, 'NX', job.created_ts, job.id)
    end
    job.fence, job.attempt, job.ver = job.fence + 1, job.attempt + 1, job.ver + 1
    job.lease_until, job.worker, job.msg_id = LEASE_UNTIL, WORKER, msg_id
    local attempt = text[job.attempt]
    local lease, entry = lease_words(job), entry_words(job)
    call('HSET', job.key, 'status', 'running', 'updated_ts', NOW_S, 'lease', lease, 'entry', entry)
    local data = '{"attempt":' .. attempt .. ',"worker":"' .. WORKER .. '"}'
    emit(job.key, 'running', 'worker.start', data, job.ttl_s, tonumber(LEASE_UNTIL))
    note(job.id, 'claim', text[job.ver], task, 'queued', 'running', attempt, text[job.fence], was_fence,
      LEASE_UNTIL, was_lease, WORKER, job.max_attempts)
    begin_rows(task, lease, job.ttl_s)
    rows[rows_n + 1], rows[rows_n + 2], rows[rows_n + 3] = job.id, payload, entry
    rows_n, leases_n = rows_n + 3, leases_n + 1
  end

  -- The answer that handed this lease to us was lost, so nobody ran the job: no attempt is spent.
  local function give_back(job, task)
    local fence, was = text[job.fence], job.lease_until
    job.ver, job.attempt, job.lease_until, job.status = job.ver + 1, job.attempt - 1, '0', 'queued'
    note(job.id, 'release', text[job.ver], task, 'running', 'queued', text[job.attempt], fence, fence,
      '0', was, WORKER, job.max_attempts)
  end

  -- An entry of ours or of another worker, in whatever state its job is by now.
  local function take(msg_id, flat, ours_unknown)
    local id, task, payload = fields_of(flat)
    local job, unreadable = read_job(id)
    if unreadable then
      return set_aside(id, msg_id, unreadable, flat)
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
        -- The group was lost and made again: the entry is its holder's, and is looked at when it is idle.
        return pcall('XCLAIM', STREAM, GROUP, job.worker, '0', msg_id, 'JUSTID')
      end
      if job.lease_until == '0' and silent_ms(job, NOW) < FOREIGN_MS then
        return -- a worker of another make runs it: looked at again when this entry is idle
      end
      if not reap(job, task, LOST_MAX) then
        return drop_entry(msg_id)
      end
    elseif job.msg_id ~= '-' and job.msg_id ~= msg_id and has_entry(job.msg_id) then -- superseded
      return drop_entry(msg_id)
    end
    start(job, msg_id, task, payload)
  end

  -- Takes a pending entry over, whoever held it; an entry deleted meanwhile is only acknowledged.
  local function take_over(msg_id, ours_unknown)
    local claimed = call('XCLAIM', STREAM, GROUP, WORKER, '0', msg_id)
    if claimed[1] and claimed[1][2] then
      take(msg_id, claimed[1][2], ours_unknown)
    else
      call('XACK', STREAM, GROUP, msg_id)
    end
  end

  -- Takes one idle entry if its lease is over; a second suspect waits for another worker or a later claim.
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

  -- What ran out, whoever held it.
  local function take_back()
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

  -- S-28: the answer to an earlier claim was lost; what it took is handed out again.
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

  rest = {
    take = take, take_back = take_back, recover = recover, promote = promote,
    ensure_group = ensure_group, still_runs = still_runs,
  }
  return rest
end

-- Most entries are of jobs that nobody has touched since they were submitted, to be done at once and
-- outside of any trace. Their lease words tell so, and all that follows is known without a closer look.
local FRESH = '^0 1 0 (%d+) 0 0 %-$'
local FRESH_EVENT = '{"attempt":1,"worker":"' .. WORKER .. '"}'
local FRESH_LINE = '\tqueued\trunning\t1\t1\t0\t' .. LEASE_UNTIL .. '\t0\t' .. WORKER .. '\t'
local FRESH_HEAD = '\tclaim\t2\t' .. NOW_S .. '\t'
local FRESH_WORDS = ' 0 ' .. LEASE_UNTIL .. ' ' .. WORKER

local plain = {} -- tasks without anything that would break the journal's lines
local attempts_of = {} -- what fresh lease words say of the attempts; false for words that are not fresh
local words_of = {} -- and the words that follow them

local function is_fresh(lease)
  local max_attempts = attempts_of[lease]
  if max_attempts == nil then
    max_attempts = match(lease, FRESH) or false
    attempts_of[lease] = max_attempts
    words_of[lease] = max_attempts and '1 2 1 ' .. max_attempts .. FRESH_WORDS
  end
  return max_attempts
end

-- What the last fresh job has in common with most that follow it, and what comes of that.
local seen_task, seen_lease, seen_ttl_s
local fresh_lease, fresh_end

local function see(task, lease, ttl_s)
  local max_attempts = lease and is_fresh(lease)
  if not max_attempts or (not plain[task] and string.find(task, '%c')) then
    return false
  end
  plain[task] = true
  seen_task, seen_lease, seen_ttl_s = task, lease, ttl_s
  fresh_lease, fresh_end = words_of[lease], ttl_s and end_of(ttl_s, tonumber(LEASE_UNTIL))
  begin_run(FRESH_HEAD .. task .. FRESH_LINE .. max_attempts)
  begin_rows(task, fresh_lease, ttl_s)
  return true
end

local function look_closely(msg_id, flat)
  seen_task = nil -- others come between
  return uncommon().take(msg_id, flat, false)
end

-- An entry that was not handed out before. This is what a busy server does most: its steps stand in place
-- and not in functions.
local function take_new(msg_id, flat)
  local id, task = flat[2], flat[4]
  if flat[1] ~= 'job_id' or flat[3] ~= 'task' or flat[5] ~= 'payload' then
    return look_closely(msg_id, flat)
  end
  local key = JOB .. id
  local v = pcall('HMGET', key, 'status', 'lease', 'ttl_s')
  local as_before = task == seen_task and v[2] == seen_lease and v[3] == seen_ttl_s
  if v[1] ~= 'queued' or not (as_before or see(task, v[2], v[3])) then
    return look_closely(msg_id, flat)
  end
  local events = key .. ':events'
  call('HSET', key, 'status', 'running', 'updated_ts', NOW_S, 'lease', fresh_lease)
  local added = pcall('XADD', events, '*', 'type', 'running', 'ts', NOW_S, 'step', 'worker.start', 'data',
    FRESH_EVENT)
  if added.err then
    quarantine().emit_anew(key, added.err, '*', 'type', 'running', 'ts', NOW_S, 'step', 'worker.start', 'data',
      FRESH_EVENT)
  end
  if fresh_end then
    call('PEXPIREAT', key, fresh_end)
    call('PEXPIREAT', events, fresh_end)
  end
  if run_n >= RUN_MOST then
    end_run()
  end
  run_n = run_n + 1
  run[run_n] = id
  rows[rows_n + 1], rows[rows_n + 2], rows[rows_n + 3] = id, flat[6], msg_id
  rows_n, leases_n = rows_n + 3, leases_n + 1
end

-- What the workers' table says of this one: its latest claim, the suspect it runs, its slots. When a later
-- claim came first, what this one takes would be known to no one (S-28).
local instance, number, last_suspect, slots = match(own('HGET', WORKERS, WORKER) or '',
  '^%d+ (%S+) (%d+) (%S+)( ?%d*)$')
if instance == ARGV[8] and tonumber(number) >= tonumber(ARGV[9]) then
  return { 'late', NOW, '', '', '0', {}, {} }
end
if last_suspect and last_suspect ~= '-' and uncommon().still_runs(last_suspect) then
  suspect = last_suspect
end

local state = is_paused() and 'paused' or 'ok'
local dry = '' -- the last entry of the stream, once there is nothing new behind it
local due = '0' -- when the first delayed job is due; 0 when there is none

if state == 'ok' then
  due = own('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')[2] or '0'
  if due ~= '0' and tonumber(due) <= NOW then
    uncommon().promote('1000')
    due = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')[2] or '0'
  end
  if due ~= '0' then -- another program's score may be anything
    due = format('%d', math.max(NOW, math.min(tonumber(due), NOW + 86400000)))
  end
  if ARGV[6] == '1' then
    uncommon().recover()
  end
  local search_at = tonumber(own('HGET', UPKEEP, 'search_at')) or 0
  if not (NOW < search_at and search_at <= NOW + 1000) then
    uncommon().take_back()
  end
end

while state == 'ok' and dry == '' and leases_n < LIMIT do
  local wanted = LIMIT - leases_n
  local reply = pcall('XREADGROUP', 'GROUP', GROUP, WORKER, 'COUNT', wanted, 'STREAMS', STREAM, '>')
  if reply and reply.err then
    uncommon().ensure_group()
    reply = call('XREADGROUP', 'GROUP', GROUP, WORKER, 'COUNT', wanted, 'STREAMS', STREAM, '>')
  end
  local entries = reply and reply[1][2] or {}
  for i = 1, #entries do
    take_new(entries[i][1], entries[i][2])
  end
  if #entries < wanted then
    dry = entries[1] and entries[#entries][1] or '0-0'
  end
end

call('HSET', WORKERS, WORKER, NOW_S .. ' ' .. ARGV[8] .. ' ' .. ARGV[9] .. ' ' .. suspect .. (slots or ''))
-- Where a waiting worker listens from, so that nothing that is added after this moment is missed. Not
-- told while there may be more to take at once. What was called out before is not told with leases:
-- a worker that hears it twice only looks twice.
local woken = ''
if leases_n > 0 then
  own('HINCRBY', STATS, 'started', format('%d', leases_n))
  dry = not more_idle and dry or ''
else -- (XINFO, which also tells it, costs three times as much)
  local last = pcall('XREVRANGE', STREAM, '+', '-', 'COUNT', '1')[1]
  local called = own('XREVRANGE', WAKE, '+', '-', 'COUNT', '1')[1]
  dry, woken = last and last[1] or '0-0', called and called[1] or '0-0'
end
flush()
return { state, NOW, dry, woken, due, groups, aside }
