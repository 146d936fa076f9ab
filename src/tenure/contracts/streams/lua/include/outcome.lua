-- The general path of settle: read the job, check the fence, decide, write. Settle includes it inside a function. It
-- uses `acked`, `acked_n` and `inline` of settle.
-- @include reap

local function close(job, o, to, kind, field)
  finish(job, o.task, to, kind, field, o.body, 'worker.' .. to, inline(field, o.body), o.error_code,
    o.result_h)
  acked_n = acked_n + 1
  acked[acked_n] = o.msg_id
  return { kind, 0 }
end

-- The job waits again; `attempt` is its new count. The field `settled` keeps the verdict for a resent outcome, because
-- the next claim may change everything else.
local function requeue(job, kind, attempt, due, event, data, error_code, msg_id, error_body)
  local lease, worker, fence = job.lease_until, job.worker, text[job.fence]
  job.ver, job.attempt, job.lease_until, job.msg_id = job.ver + 1, attempt, '0', msg_id
  job.worker, job.lost = '-', '0' -- the worker is alive, so the job is not a suspect
  call('HSET', job.key, 'status', 'queued', 'updated_ts', NOW_S, 'lease', lease_field(job),
    'entry', entry_field(job), 'due_ms', text[due], 'error', error_body,
    'settled', fence .. ' ' .. kind .. ' ' .. text[due])
  emit(job.key, event, 'worker.' .. kind, data, job.ttl_s, wait_until(due, job.ttl_s))
  record(job, kind, job.task, 'running', 'queued', lease, worker,
    more(job.max_attempts, '', '', error_code, text[due], ''))
  count(kind)
end

local function wait_again(job, o, kind, attempt)
  if call('HGET', job.key, 'cancel') == '1' then -- it would only be started to be stopped
    return close(job, o, 'canceled', 'cancel', 'error')
  end
  local due = o.delay_ms > 0 and NOW + o.delay_ms or 0
  local msg_id = enqueue(job.id, o.task, call('HGET', job.key, 'payload') or '', due)
  requeue(job, kind, attempt, due, kind, '{"attempt":' .. job.attempt .. ',"due_ms":' .. text[due] .. '}',
    o.error_code, msg_id, o.body)
  acked_n = acked_n + 1
  acked[acked_n] = o.msg_id
  return { 'retry', due }
end

-- The pending entry stays in the group and looks idle, so that the next claim takes it before newer entries: a
-- released job does not lose its place.
local function release(job, o)
  if call('HGET', job.key, 'cancel') == '1' then
    return close(job, o, 'canceled', 'cancel', 'error')
  end
  hand_back(o.msg_id, job.worker)
  requeue(job, 'release', job.attempt - 1, 0, 'queued', '{}', '', o.msg_id, '')
  own('HSET', UPKEEP, 'search_at', '0')
  wake()
  return { 'release', 0 }
end

-- A job with max_attempts gets that many attempts. Without it, a job is tried again only if the task's own policy says
-- so (kind retry); in the contract a failure ends in `error`.
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

-- For each kind of outcome: the states or kinds it may have become, and the verdict for each.
local BECAME = {
  complete = { done = 'complete' },
  cancel = { canceled = 'cancel' },
  fail = { error = 'bury', retry = 'retry', canceled = 'cancel' },
  retry = { error = 'bury', retry = 'retry', canceled = 'cancel' },
  bury = { error = 'bury' },
  snooze = { snooze = 'retry', canceled = 'cancel' },
  release = { release = 'release', canceled = 'cancel' },
}

-- The verdict on an outcome that was accepted before; nil if this attempt was not settled.
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

-- A suspect is a job that may have killed its worker; a worker runs one at a time (S-13). This one has ended, so the
-- worker may take the next one.
local function free_suspect(worker, id)
  local seen = own('HGET', WORKERS, worker) or ''
  local rest, suspect, slots = match(seen, '^(%d+ %S+ %d+) (%S+)( ?%d*)$')
  if suspect == id then
    call('HSET', WORKERS, worker, rest .. ' -' .. slots)
    own('HSET', UPKEEP, 'search_at', '0')
    wake()
  end
end

-- Settles one outcome; returns its verdict.
return function(id, msg_id, fence, token, kind, task, body, result_h, error_code, delay_ms)
  local job, unreadable = read_job(id)
  local why = why_lost(job, unreadable, msg_id, fence, token)
  if not job or job.lost ~= '0' then
    free_suspect(token, id)
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
