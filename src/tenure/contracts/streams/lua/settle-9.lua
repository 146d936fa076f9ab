-- Ends leases, each by its own outcome. Hash, terminal event, acknowledgement and deletion of the
-- entry are one step; an outcome sent again after a lost answer gets the verdict it got before.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace
-- ARGV[2..] rows of three kinds:
--   'end', job_id, msg_id, fence, token, kind, task, body (result or error JSON), hash of the result,
--     error code, delay_ms
--   'done', result JSON, hash of the result, how many jobs, and of each job_id, msg_id: completions with
--     the same result by a holder that gives the lease words back as it got them; they stand in:
--   'like', lease words, task, ttl_s, when they were claimed: of all the 'done' rows up to the next 'like'
-- Returns how many outcomes there were if each is a completion that was accepted at first sight; else per
--   outcome 'complete', { 'complete' | 'retry' | 'bury' | 'release' | 'cancel', due_ms } or { 'lost', reason },
--   and behind them what was set aside, if anything was, as { job_id, reason, ... }
-- Clauses S-14 S-15 S-16 S-17 S-20 S-21 S-22
-- @include step
local byte, sub = string.byte, string.sub

-- Results up to this size travel inside the terminal event, larger ones are fetched from the job.
local INLINE_MAX = 4096
-- From so many entries on it is worth asking whether the stream can be cut off behind them.
local CUT_OFF_FROM = 20

local acked = {}
local acked_n = 0

local function inline(name, body)
  if body == '' then
    return '{}'
  elseif #body > INLINE_MAX then
    return '{"' .. name .. '_bytes":' .. #body .. '}'
  end
  return '{"' .. name .. '":' .. body .. '}'
end

local close_look

-- Every outcome but the common one; made when it is first asked for.
local function closely()
  -- @include job
  -- @include guard
  -- @include end
  -- @include enqueue
  -- @include reap
  local function close(job, o, to, kind, field)
    finish(job, o.task, to, kind, field, o.body, 'worker.' .. to, inline(field, o.body), o.error_code,
      o.result_h)
    acked_n = acked_n + 1
    acked[acked_n] = o.msg_id
    return { kind, 0 }
  end

  -- The job goes back to waiting; `attempt` is what its count shall be. `settled` remembers the verdict
  -- for a resent outcome, since the next claim may have changed everything else.
  local function back(job, kind, attempt, due, event, data, error_code, msg_id, error_body)
    local lease, worker, fence = job.lease_until, job.worker, text[job.fence]
    job.ver, job.attempt, job.lease_until, job.msg_id = job.ver + 1, attempt, '0', msg_id
    job.worker, job.lost = '-', '0' -- the worker came back to say so: the job has not killed it
    call('HSET', job.key, 'status', 'queued', 'updated_ts', NOW_S, 'lease', lease_words(job),
      'entry', entry_words(job), 'due_ms', text[due], 'error', error_body,
      'settled', fence .. ' ' .. kind .. ' ' .. text[due])
    emit(job.key, event, 'worker.' .. kind, data, job.ttl_s)
    note(job.id, kind, text[job.ver], job.task, 'running', 'queued', text[attempt], fence, fence, '0',
      lease, worker, more(job.max_attempts, '', '', error_code, text[due], ''))
    count(kind)
  end

  local function wait_again(job, o, kind, attempt)
    if call('HGET', job.key, 'cancel') == '1' then -- it would only start again to be stopped
      return close(job, o, 'canceled', 'cancel', 'error')
    end
    local due = o.delay_ms > 0 and NOW + o.delay_ms or 0
    local msg_id = enqueue(job.id, o.task, call('HGET', job.key, 'payload') or '', due)
    back(job, kind, attempt, due, kind, '{"attempt":' .. job.attempt .. ',"due_ms":' .. text[due] .. '}',
      o.error_code, msg_id, o.body)
    acked_n = acked_n + 1
    acked[acked_n] = o.msg_id
    return { 'retry', due }
  end

  -- The entry stays where it is in the group and looks idle, so that the next claim takes it before
  -- anything newer: a job handed back does not lose its place.
  local function release(job, o)
    if call('HGET', job.key, 'cancel') == '1' then
      return close(job, o, 'canceled', 'cancel', 'error')
    end
    hand_back(o.msg_id, job.worker)
    back(job, 'release', job.attempt - 1, 0, 'queued', '{}', '', o.msg_id, '')
    own('HSET', UPKEEP, 'search_at', '0')
    wake()
    return { 'release', 0 }
  end

  -- A job that names its attempts is held to them. One that does not is tried again only when the
  -- task's own policy asked for it: the contract's plain failure ends in `error`.
  local function failed(job, o)
    local max_attempts = tonumber(job.max_attempts)
    local left = max_attempts > 0 and job.attempt < max_attempts
    if (o.kind == 'retry' and (left or max_attempts == 0)) or (o.kind == 'fail' and left) then
      return wait_again(job, o, 'retry', job.attempt)
    end
    return close(job, o, 'error', 'bury', 'error')
  end

  local DECIDE = {
    complete = function(job, o) return close(job, o, 'done', 'complete', 'result') end,
    cancel = function(job, o) return close(job, o, 'canceled', 'cancel', 'error') end,
    snooze = function(job, o) return wait_again(job, o, 'snooze', job.attempt - 1) end,
    release = release,
    fail = failed,
    retry = failed,
    bury = failed,
  }

  -- What an accepted outcome of each kind may have become, and the verdict that says so.
  local BECAME = {
    complete = { done = 'complete' },
    cancel = { canceled = 'cancel' },
    fail = { error = 'bury', retry = 'retry', canceled = 'cancel' },
    retry = { error = 'bury', retry = 'retry', canceled = 'cancel' },
    bury = { error = 'bury' },
    snooze = { snooze = 'retry', canceled = 'cancel' },
    release = { release = 'release', canceled = 'cancel' },
  }

  -- The verdict on an outcome that was accepted before; nil if this attempt was not settled by us.
  local function replayed(job, fence, token, kind)
    if not job then
      return nil
    end
    if FINAL[job.status] and job.fence == fence and job.worker == token then
      local verdict = BECAME[kind][job.status]
      return verdict and { verdict, 0 }
        or { 'lost', 'the attempt was already settled: ' .. job.status }
    end
    local settled = call('HGET', job.key, 'settled') or ''
    local old_fence, became, due = settled:match('^(%d+) (%a+) (%d+)$')
    if tonumber(old_fence) ~= fence then
      return nil
    end
    local verdict = BECAME[kind][became]
    return verdict and { verdict, tonumber(due) }
      or { 'lost', 'the attempt was already settled: ' .. became }
  end

  -- The worker runs no suspect any more (S-13): it may take the next one.
  local function suspect_ended(worker, id)
    local seen = own('HGET', WORKERS, worker) or ''
    local rest, suspect, slots = match(seen, '^(%d+ %S+ %d+) (%S+)( ?%d*)$')
    if suspect == id then
      call('HSET', WORKERS, worker, rest .. ' -' .. slots)
      own('HSET', UPKEEP, 'search_at', '0')
      wake()
    end
  end

  return function(id, msg_id, fence, token, kind, task, body, result_h, error_code, delay_ms)
    local job, unreadable = read_job(id)
    local why = why_lost(job, unreadable, msg_id, fence, token)
    if not job or job.lost ~= '0' then
      suspect_ended(token, id)
    end
    if why then
      local before = replayed(job, fence, token, kind)
      if before then
        return before
      end
      reject(id, task, job, fence, token, why)
      return { 'lost', why }
    end
    job.task = task
    return DECIDE[kind](job, {
      kind = kind, msg_id = msg_id, task = task, body = body, result_h = result_h,
      error_code = error_code, delay_ms = delay_ms,
    })
  end
end

-- What the next 'done' rows have in common, of both the job's words and its journal line.
local given, left, ttl_s, task, until_ms, fence, token, line

-- The claim gave the job its whole time to live. So soon after it a second time would change nothing that
-- can be seen in seconds, in which it is told; and would be two of five commands.
local function given_life(words, claimed_ms, lease_until)
  local life_s = tonumber(words)
  if not life_s or (life_s >= 500 and NOW - tonumber(claimed_ms) < 500
      and claimed_ms + life_s * 1000 >= lease_until + RUNNING_MS) then
    return false
  end
  return words
end

local function alike(at)
  given, task = ARGV[at + 1], ARGV[at + 2]
  local ver, attempt, max_attempts, lost
  fence, ver, attempt, max_attempts, lost, until_ms, token =
    match(given, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+)$')
  ttl_s = given_life(ARGV[at + 3], ARGV[at + 4], until_ms)
  ver = format('%d', ver + 1)
  left = fence .. ' ' .. ver .. ' ' .. attempt .. ' ' .. max_attempts .. ' ' .. lost .. ' 0 ' .. token
  line = '\tcomplete\t' .. ver .. '\t' .. NOW_S .. '\t' .. task .. '\trunning\tdone\t' .. attempt
    .. '\t' .. fence .. '\t' .. fence .. '\t0\t' .. until_ms .. '\t' .. token .. '\t' .. max_attempts .. '\t'
  -- A job that lost its lease before may be its worker's suspect: look closer (S-13).
  until_ms = lost == '0' and tonumber(until_ms) or 0
end

local outcomes_n = 0
local as_given = 0
local verdicts = {} -- by the number of the outcome; none for what was completed as given

local function look_closely(...)
  close_look = close_look or closely()
  verdicts[outcomes_n] = close_look(...)
end

-- A 'done' row; returns where the next row begins. The common end: the job is, word for word, as its
-- holder was given it and the lease still runs, so nobody has come between and nothing needs to be taken
-- apart. This loop is what a busy server does most: it has its steps in place and not in functions.
local function complete(at)
  local body, result_h = ARGV[at + 1], ARGV[at + 2]
  local data, tail = inline('result', body), line .. result_h
  local expires = ttl_s and end_of(ttl_s)
  local is_alive = until_ms > NOW
  local next_at = at + 4 + 2 * ARGV[at + 3]
  begin_run(tail)
  for i = at + 4, next_at - 1, 2 do
    local id, msg_id = ARGV[i], ARGV[i + 1]
    local key = JOB .. id
    local v = pcall('HMGET', key, 'status', 'lease')
    outcomes_n = outcomes_n + 1
    if is_alive and v[2] == given and v[1] == 'running' then
      local events = key .. ':events'
      call('HSET', key, 'status', 'done', 'updated_ts', NOW_S, 'lease', left, 'result', body)
      local added = pcall('XADD', events, '*', 'type', 'done', 'ts', NOW_S, 'step', 'worker.done', 'data', data)
      if added.err then
        quarantine().emit_anew(key, added.err, '*', 'type', 'done', 'ts', NOW_S, 'step', 'worker.done', 'data', data)
      end
      if expires then
        call('PEXPIREAT', key, expires)
        call('PEXPIREAT', events, expires)
      end
      if run_n >= RUN_MOST then
        end_run()
      end
      run_n = run_n + 1
      run[run_n] = id
      acked_n = acked_n + 1
      acked[acked_n] = msg_id
      as_given = as_given + 1
    else
      look_closely(id, msg_id, tonumber(fence), token, 'complete', task, body, result_h, '', 0)
    end
  end
  return next_at
end

local at = 2
while ARGV[at] do
  local row = ARGV[at]
  if row == 'like' then
    alike(at)
    at = at + 5
  elseif row == 'done' then
    at = complete(at)
  else
    outcomes_n = outcomes_n + 1
    look_closely(ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3]), ARGV[at + 4], ARGV[at + 5],
      ARGV[at + 6], ARGV[at + 7], ARGV[at + 8], ARGV[at + 9], tonumber(ARGV[at + 10]))
    at = at + 11
  end
end
if as_given > 0 then
  own('HINCRBY', STATS, 'done', format('%d', as_given))
end

-- Whether entry `a` is older than `b`; false also for ids that are not thirteen digits, "-" and a number.
local function older(a, b)
  if byte(a, 14) ~= 45 or byte(b, 14) ~= 45 then
    return false
  elseif #a == #b then
    return a < b
  end
  local a_ms, b_ms = sub(a, 1, 13), sub(b, 1, 13)
  return a_ms < b_ms or (a_ms == b_ms and #a < #b)
end

-- Redis looks for every entry that it deletes from the front of its block, which costs more than the
-- settling of a job's hash. Where a whole stretch is over, the stream is cut off behind it instead:
-- ours are its oldest entries, in their order, and what the group handed out up to the last of them
-- (a group hands out in order) waits for nobody any more.
local function cut_off(acknowledged)
  local last = acked[1]
  for i = 2, acked_n do
    local a = last
    last = acked[i]
    if not (#a == #last and a < last) and not older(a, last) then
      return false
    end
  end
  if byte(last, 14) ~= 45 or acknowledged < acked_n then
    return false
  end
  local first = call('XRANGE', STREAM, '-', '+', 'COUNT', '1')[1]
  if not first or first[1] ~= acked[1] then
    return false
  end
  local pending = call('XPENDING', STREAM, GROUP)
  if pending[1] > 0 and not older(last, pending[2]) then
    return false
  end
  local ms, seq = match(last, '^(%d+)%-(%d+)$')
  return #seq < 15 and call('XTRIM', STREAM, 'MINID', ms .. '-' .. format('%d', seq + 1)) >= acked_n
end

local acknowledged = 0
for from = 1, acked_n, 1000 do -- unpack has a limit
  local count = pcall('XACK', STREAM, GROUP, unpack(acked, from, math.min(from + 999, acked_n)))
  acknowledged = acknowledged + (tonumber(count) or 0)
end
if acked_n < CUT_OFF_FROM or not cut_off(acknowledged) then
  for from = 1, acked_n, 1000 do
    pcall('XDEL', STREAM, unpack(acked, from, math.min(from + 999, acked_n)))
  end
end
flush()
if as_given == outcomes_n and #aside == 0 then
  return outcomes_n
end
for i = 1, outcomes_n do
  verdicts[i] = verdicts[i] or 'complete'
end
verdicts[outcomes_n + 1] = #aside > 0 and aside or nil
return verdicts
