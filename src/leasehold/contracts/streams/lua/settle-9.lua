-- Ends leases, each by its own outcome. Hash, terminal event, acknowledgement and deletion of the
-- entry are one step; an outcome sent again after a lost answer gets the verdict it got before.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace
-- ARGV[2..] per outcome: job_id, msg_id, fence, token, kind, task, body (result or error JSON), hash
--   of the result, error code, delay_ms, and for the common end of a job ('' otherwise): the lease
--   words it should have, those it shall have, ttl_s, lease_until, its journal line before and after
--   the time
-- Returns per outcome { 'complete' | 'retry' | 'bury' | 'release' | 'cancel', due_ms } or
--   { 'lost', reason }
-- Clauses S-14 S-15 S-16 S-17 S-20 S-21 S-22
-- @include job
-- @include guard
-- @include end
-- @include waiting
local WIDTH = 16
-- Results up to this size travel inside the terminal event, larger ones are fetched from the job.
local INLINE_MAX = 4096

local acked = {}
local verdicts = {}

local function inline(name, body)
  if body == '' then
    return '{}'
  elseif #body > INLINE_MAX then
    return '{"' .. name .. '_bytes":' .. #body .. '}'
  end
  return '{"' .. name .. '":' .. body .. '}'
end

local function close(job, o, to, kind, field)
  finish(job, o.task, to, kind, field, o.body, 'worker.' .. to, inline(field, o.body), o.error_code,
    o.result_h)
  acked[#acked + 1] = o.msg_id
  return { kind, 0 }
end

-- The job goes back to waiting; `attempt` is what its count shall be. `settled` remembers the verdict
-- for a resent outcome, since the next claim may have changed everything else.
local function back(job, kind, attempt, due, event, data, error_code, msg_id, error_body)
  local lease, worker, fence = job.lease_until, job.worker, text[job.fence]
  job.ver, job.attempt, job.lease_until, job.msg_id = job.ver + 1, attempt, '0', msg_id
  job.worker, job.lost = '-', '0' -- the worker came back to say so: the job has not killed it
  call('HSET', job.key, 'status', 'queued', 'updated_ts', NOW_S, 'lease', lease_words(job),
    'due_ms', text[due], 'error', error_body, 'settled', fence .. ' ' .. kind .. ' ' .. text[due])
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
  local msg_id = enqueue(job.id, o.task, call('HGET', job.key, 'payload'), due)
  back(job, kind, attempt, due, kind, '{"attempt":' .. job.attempt .. ',"due_ms":' .. text[due] .. '}',
    o.error_code, msg_id, o.body)
  acked[#acked + 1] = o.msg_id
  return { 'retry', due }
end

-- The entry stays where it is in the group and looks idle, so that the next claim takes it before
-- anything newer: a job handed back does not lose its place.
local function release(job, o)
  if call('HGET', job.key, 'cancel') == '1' then
    return close(job, o, 'canceled', 'cancel', 'error')
  end
  call('XCLAIM', STREAM, GROUP, job.worker, '0', o.msg_id, 'IDLE', '86400000', 'JUSTID')
  back(job, 'release', job.attempt - 1, 0, 'queued', '{}', '', o.msg_id, '')
  call('HSET', UPKEEP, 'search_at', '0')
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

local function alone_no_more(worker)
  local seen = call('HGET', WORKERS, worker) or ''
  local rest, alone = match(seen, '^(%d+ %S+ %d+) (%S+)$')
  if alone and alone ~= '-' then
    call('HSET', WORKERS, worker, rest .. ' -')
    wake()
  end
end

local COMPLETE = { 'complete', 0 }

-- The common end: the job is, word for word, as its holder was given it and the lease still runs, so
-- nobody has come between and nothing needs to be taken apart. False when a closer look is needed.
local function complete_as_given(at)
  if ARGV[at + 10] == '' or tonumber(ARGV[at + 13]) <= NOW then
    return false
  end
  local key = job_key(ARGV[at])
  local v = call('HMGET', key, 'status', 'lease')
  if v[1] ~= 'running' or v[2] ~= ARGV[at + 10] then
    return false
  end
  local body = ARGV[at + 6]
  call('HSET', key, 'status', 'done', 'updated_ts', NOW_S, 'lease', ARGV[at + 11], 'result', body)
  emit(key, 'done', 'worker.done', inline('result', body), ARGV[at + 12] ~= '' and ARGV[at + 12])
  add_line(ARGV[at + 14] .. NOW_S .. ARGV[at + 15])
  acked[#acked + 1] = ARGV[at + 1]
  return true
end

local function settle(at)
  local id, msg_id, fence, token = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local kind, task = ARGV[at + 4], ARGV[at + 5]
  local job = read_job(id)
  local why = why_lost(job, msg_id, fence, token)
  if job and job.lost ~= '0' then -- it may have been claimed alone: its worker may go on
    alone_no_more(token)
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
    kind = kind, msg_id = msg_id, task = task, body = ARGV[at + 6], result_h = ARGV[at + 7],
    error_code = ARGV[at + 8], delay_ms = tonumber(ARGV[at + 9]),
  })
end

local as_given = 0
for at = 2, #ARGV, WIDTH do
  if complete_as_given(at) then
    as_given = as_given + 1
    verdicts[#verdicts + 1] = COMPLETE
  else
    verdicts[#verdicts + 1] = settle(at)
  end
end
if as_given > 0 then
  counted['done'] = (counted['done'] or 0) + as_given
end
for from = 1, #acked, 1000 do -- unpack has a limit
  local last = math.min(from + 999, #acked)
  redis.pcall('XACK', STREAM, GROUP, unpack(acked, from, last))
  call('XDEL', STREAM, unpack(acked, from, last))
end
flush()
return verdicts
