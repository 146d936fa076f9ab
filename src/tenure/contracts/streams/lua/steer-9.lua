-- Cancels, retries or removes jobs for a user. The first terminal state wins.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] cancel | retry | remove  ARGV[3..] job ids
-- Returns per id 'ok', 'requested' (its worker will stop it), 'missing', 'unreadable', or the state that forbids it
-- Clauses S-31 S-32 S-33
-- @include job
-- @include end
local answers = {}
local steps = {}

local function task_of(job)
  return (string.gsub(call('HGET', job.key, 'task') or '', '%c', ' '))
end

function steps.cancel(job)
  if FINAL[job.status] then
    return job.status
  end
  if job.status == 'running' then
    call('HSET', job.key, 'cancel', '1')
    return 'requested'
  end
  local msg_id = job.msg_id
  finish(job, task_of(job), 'canceled', 'cancel', 'error', '', 'gateway.cancel', '{}', '', '')
  drop_entry(msg_id)
  own('ZREM', DELAYED, job.id)
  return 'ok'
end

-- A finished job runs again from its first attempt.
function steps.retry(job)
  if not FINAL[job.status] then
    return job.status
  end
  local task, payload = task_of(job), call('HGET', job.key, 'payload') or ''
  local from = job.status
  job.ver, job.attempt, job.lost, job.lease_until, job.worker = job.ver + 1, 0, '0', '0', '-'
  job.msg_id = enqueue(job.id, task, payload, 0)
  call('HSET', job.key, 'status', 'queued', 'updated_ts', NOW_S, 'lease', lease_field(job),
    'entry', entry_field(job), 'result', '', 'error', '', 'settled', '', 'cancel', '0', 'due_ms', '0')
  emit(job.key, 'queued', 'gateway.retry', '{}', job.ttl_s)
  record(job, 'reopen', task, from, 'queued', '0', '')
  return 'ok'
end

local function forget(id)
  own('ZREM', DELAYED, id)
  own('ZREM', INDEX, id)
  call('DEL', job_key(id), job_key(id) .. ':events')
end

function steps.remove(job)
  if job.status == 'running' then
    return job.status
  end
  job.ver, job.lease_until = job.ver + 1, '0'
  record(job, 'remove', task_of(job), job.status, 'removed', '0', '', '0')
  drop_entry(job.msg_id)
  forget(job.id)
  return 'ok'
end

-- The key of a job's event stream looks like the key of a job called `<id>:events`.
local function is_events(id)
  local owner = match(id, '^(.+):events$')
  return owner and call('EXISTS', job_key(owner)) == 1
end

for at = 3, #ARGV do
  local job, unreadable = read_job(ARGV[at])
  local answer = unreadable and 'unreadable' or 'missing'
  if job then
    answer = steps[ARGV[2]](job)
  elseif unreadable and is_events(ARGV[at]) then
    answer = 'missing'
  elseif unreadable and ARGV[2] == 'remove' then
    forget(ARGV[at])
    answer = 'ok'
  end
  answers[#answers + 1] = answer
end
flush()
return answers
