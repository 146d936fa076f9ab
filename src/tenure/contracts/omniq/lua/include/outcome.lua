-- Ends leases: the job is completed, has failed, or waits again. The caller has checked the lease. Jobs that end
-- without a lease are ended here too.
local KEEP_COMPLETED, KEEP_FAILED = 100, 10000
local TRIM_MAX = 5000 -- per call: a list that another program filled is trimmed step by step
local finished = { completed = {}, failed = {} }

-- Appends to the job's event stream. Only rare events are written there; the ledger makes the others from the hash.
local function append_event(id, kind, data)
  local key = BASE .. ':events:' .. id
  call('XADD', key, 'MAXLEN', '~', '1000', '*', 'type', kind, 'ts', NOW_S, 'data', data)
  call('PEXPIRE', key, '604800000')
end

local function end_lease(job)
  if job.state == 'active' then
    active_off[#active_off + 1] = job.id
    free_slot(job.gid)
  end
end

local function settled(job, kind, due)
  job.settled_token, job.settled_kind = job.token ~= '' and job.token or '-', kind
  job.settled_due = text[due]
end

-- `o`: error (a text), error_json, error_code, result, result_h, worker.
local function complete(job, o)
  settled(job, 'complete', 0)
  record(job, 'complete', 'completed', job.attempt, '0', job.worker, o.result_h)
  local tn = tn_field(job, 'completed', '0', job.worker)
  if o.result and o.result ~= '' and o.result ~= 'null' then
    write('HSET', job.key, 'state', 'completed', 'completed_ms', NOW_S, 'updated_ms', NOW_S, 'lease_token', '',
      'lock_until_ms', '', 'tn', tn, 'result', o.result)
  else
    write('HSET', job.key, 'state', 'completed', 'completed_ms', NOW_S, 'updated_ms', NOW_S, 'lease_token', '',
      'lock_until_ms', '', 'tn', tn)
  end
  end_lease(job)
  move(job.id, 'active', 'completed')
  finished.completed[#finished.completed + 1] = job.id
  times.last_finish_ms = true
  count('completed')
end

local function set_error(job, o)
  if o.error and o.error ~= '' then
    write('HSET', job.key, 'last_error', string.sub(o.error, 1, 4096), 'last_error_ms', NOW_S, 'error',
      o.error_json or '', 'error_ms', NOW_S)
  end
end

-- The job has failed for good; `kind` is bury or cancel. A waiting job has left its lane before. `by_time`: its lease
-- has expired.
local function fail(job, o, kind, by_time)
  local from = job.state
  settled(job, kind == 'cancel' and 'cancel' or 'bury', 0)
  record(job, kind, 'failed', job.attempt, '0', o.worker or job.worker, '\t\t' .. (o.error_code or '') .. '\t0')
  end_lease(job)
  set_error(job, o)
  write('HSET', job.key, 'state', 'failed', 'failed_ms', NOW_S, 'updated_ms', NOW_S, 'lease_token', '',
    'lock_until_ms', '', 'tn', tn_field(job, 'failed', '0', job.worker))
  move(job.id, from, 'failed')
  finished.failed[#finished.failed + 1] = job.id
  append_event(job.id, 'failed', o.error_json and o.error_json ~= '' and '{"error":' .. o.error_json .. '}' or '{}')
  times.last_finish_ms = not by_time or times.last_finish_ms
  count(kind == 'cancel' and 'cancelled' or 'failed')
end

-- The job waits again until `due` (0: it is added to its lane at once).
local function requeue(job, o, kind, attempt, due, in_front)
  settled(job, kind, due)
  local to = due > 0 and 'delayed' or 'wait'
  record(job, kind, to, attempt, '0', o.worker or job.worker, '\t\t' .. (o.error_code or '') .. '\t' .. text[due])
  end_lease(job)
  set_error(job, o)
  write('HSET', job.key, 'state', to, 'attempt', text[attempt], 'updated_ms', NOW_S, 'lease_token', '',
    'lock_until_ms', '', 'due_ms', due > 0 and text[due] or '', 'tn', tn_field(job, to, '0', '-'))
  if due > 0 then
    call('ZADD', DELAYED, text[due], job.id)
  else
    join_lane(job.id, job.gid, in_front)
  end
  move(job.id, 'active', to)
  append_event(job.id, kind, '{"attempt":' .. text[job.attempt] .. ',"due_ms":' .. text[due] .. '}')
  times.last_finish_ms = kind == 'retry' or times.last_finish_ms
  count(kind)
end

-- When a failed job runs again: after its fixed delay, or after one that doubles with each attempt, with jitter.
local function backoff_due(job, chance)
  local v = call('HMGET', job.key, 'backoff_ms', 'backoff', 'backoff_ms_max')
  local wait_ms = figure(v[1], 5000) or 5000
  if v[2] == 'exponential' then
    local most = figure(v[3], 600000) or 600000
    wait_ms = math.min(wait_ms * 2 ^ math.min(job.attempt - 1, 32), most)
    wait_ms = math.floor(wait_ms / 2 + wait_ms / 2 * chance)
  end
  return NOW + math.max(0, wait_ms)
end

-- Keeps the newest finished jobs and deletes older ones.
local function trim(state, list, keep)
  local ids = finished[state]
  if #ids == 0 then
    return
  end
  each_many('LPUSH', list, ids)
  finished[state] = {}
  local over = keep > 0 and math.min(call('LLEN', list) - keep, TRIM_MAX) or 0
  while over > 0 do
    local oldest = call('RPOP', list, text[math.min(over, 500)])
    if not oldest then
      return
    end
    local off, keys = moved.off[state], {}
    for i, id in ipairs(oldest) do
      -- If the id was published again, the hash belongs to a waiting job.
      if call('HGET', JOB .. id, 'state') == state then
        keys[#keys + 1] = JOB .. id
        off[#off + 1] = id
      end
    end
    if #keys > 0 then
      call('DEL', unpack(keys))
    end
    over = over - #oldest
  end
end

local function flush_finished()
  flush_moves()
  trim('completed', COMPLETED, KEEP_COMPLETED)
  trim('failed', FAILED, KEEP_FAILED)
end

-- Applies an outcome to a job whose lease the caller holds; `o.chance` is a random number for jitter.
local decide = {}
local CANCELLED = { error = 'cancelled', error_json = '{"code":"cancelled","message":"cancelled"}',
  error_code = 'cancelled' }

local function again(job, o, kind, attempt, due, in_front)
  if job.cancel then -- it would only be started to be stopped
    fail(job, CANCELLED, 'cancel')
    return { 'cancel', 0 }
  end
  requeue(job, o, kind, attempt, due, in_front)
  return { kind == 'snooze' and 'retry' or kind, due }
end

function decide.complete(job, o)
  complete(job, o)
  return 1
end

function decide.bury(job, o)
  fail(job, o, 'bury')
  return { 'bury', 0 }
end

function decide.cancel(job, o)
  fail(job, o.error ~= '' and o or CANCELLED, 'cancel')
  return { 'cancel', 0 }
end

function decide.fail(job, o)
  if job.attempt >= job.max_attempts then
    return decide.bury(job, o)
  end
  return again(job, o, 'retry', job.attempt, backoff_due(job, o.chance), false)
end

function decide.retry(job, o)
  if job.attempt >= job.max_attempts then
    return decide.bury(job, o)
  end
  return again(job, o, 'retry', job.attempt, o.delay_ms > 0 and NOW + o.delay_ms or 0, false)
end

function decide.snooze(job, o)
  return again(job, o, 'snooze', job.attempt - 1, o.delay_ms > 0 and NOW + o.delay_ms or 0, true)
end

function decide.release(job, o)
  return again(job, o, 'release', job.attempt - 1, 0, true)
end

-- Ends one lease for an SDK's script. Returns the verdict; or nil and why not.
local function ack(id, token, kind, message)
  local job = read_job(id)
  local why = refusal(job, token, '', call('ZSCORE', ACTIVE, id))
  if why then
    reject(id, job, '', 'sdk', 'settle')
    flush()
    return nil, why
  end
  ensure_known(job)
  local verdict = decide[kind](job, { chance = 0, delay_ms = 0, result = '', result_h = '', error = message,
    error_json = '', error_code = message ~= '' and 'error' or '' })
  flush_groups()
  flush_finished()
  flush()
  return verdict
end
