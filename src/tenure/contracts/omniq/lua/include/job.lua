-- A job as its hash says, and our own words of it (see head.lua).
local STATES = { wait = true, active = true, delayed = true, failed = true, completed = true }
local LH = '^(%d+) (%d+) (%S+) (%d+) (%S+) (%S+) (%S+) (%d+)$'
local NEW_LH = '1 0 wait 0 - - - 0'

local function number(words)
  return figure(words, 0) or 0
end

-- The job's state and all that a transition needs; nil when there is no such job, or none that can be read.
local function read_job(id)
  local key = JOB .. id
  local v = call('HMGET', key, 'state', 'attempt', 'max_attempts', 'timeout_ms', 'gid', 'lease_token', 'tn',
    'task', 'cancel', 'lock_until_ms')
  if not STATES[v[1]] then
    set_aside(key, 'the state ' .. string.sub(v[1] or '', 1, 40) .. ' is none of a job')
    return nil
  end
  local job = { id = id, key = key, state = v[1], attempt = number(v[2]), max_attempts = number(v[3]),
    timeout_ms = number(v[4]), gid = v[5] or '', token = v[6] or '', task = v[8] or '', cancel = v[9] == '1',
    lock = v[10] or '' }
  local ver, fence, was, lease, worker, token, kind, due = match(v[7] or '', LH)
  job.known = ver and #ver < 16 and #fence < 16 and true or false
  if not job.known then
    ver, fence, was, lease, worker, token, kind, due = nil
  end
  job.ver, job.fence, job.was, job.lease = number(ver), number(fence), was or v[1], lease or '0'
  job.worker = worker or '-'
  job.settled_token, job.settled_kind, job.settled_due = token or '-', kind or '-', due or '0'
  if job.max_attempts < 1 then
    job.max_attempts = 1
  end
  return job
end

-- What our journal left, where the job has only been promoted since; else what the hash says, because
-- another client has made a step that we have not seen.
local function state_left(job)
  if job.state == job.was or (job.state == 'wait' and job.was == 'delayed') or job.taken_back then
    return job.was
  end
  return job.state
end

-- Our words for the job after a step: `state` and lease are new, and so is how the lease ended, if it did.
local function words(job, state, lease, worker)
  return text[job.ver] .. ' ' .. text[job.fence] .. ' ' .. state .. ' ' .. lease .. ' ' .. worker .. ' '
    .. job.settled_token .. ' ' .. job.settled_kind .. ' ' .. job.settled_due
end

-- A job that another client published enters our history when we first see it.
local function first_sight(job)
  if job.known then
    return
  end
  job.known, job.ver, job.fence, job.was = true, 1, 0, job.state
  note(job.id, 'submit', '1', plain(job.task), '', job.state == 'delayed' and 'delayed' or 'wait', '0', '0',
    '0', '0', '0', '', text[job.max_attempts], job.gid, '\t\t\t0\tseen')
end

-- One step of a job's history; fence and worker are the current ones.
local function record(job, kind, to, attempt, lease, worker, rest)
  local fence = text[job.fence]
  job.ver = job.ver + 1
  note(job.id, kind, text[job.ver], plain(job.task), state_left(job), to, text[attempt], fence, fence, lease,
    job.lease, worker == '-' and '' or worker, text[job.max_attempts], job.gid, rest)
end
