-- Reads and writes a job, and records its events in the journal.
--
-- Our own state of a job is in two hash fields beside the contract's, separated by blanks, with '-' for none:
--   lease: fence ver attempt max_attempts lost lease_until worker_id    changes with every step
--   entry: msg_id created_ts trace                                      changes when the job is queued again
-- The worker of a job that was never claimed is '+' if a claim must read `entry`: if the job was delayed, so that its
-- entry is younger than the job, or has a trace.
-- Two fields and not ten, because every field that a script reads costs time, and these change together. Not one,
-- because Redis uses the compact encoding of a hash only while no value is longer than 64 bytes.
-- @include step
-- @include text
-- @include utf8
local FINAL = { done = true, error = true, canceled = true }
local WAITS_OR_RUNS = { queued = true, running = true }
local ID_MOST = 256

local function job_key(id)
  return JOB .. id
end

-- The contract's ids are UUIDs. Other ids are accepted if they are UTF-8 without control characters.
local function is_id(id)
  if id == '' or #id > ID_MOST then
    return false
  elseif not string.find(id, '[%c\128-\255]') then
    return true
  end
  return not string.find(id, '%c') and is_utf8(id)
end

local LEASE = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) ([!-~]+)$'
local ENTRY = '^(%d+%-%d+) (%d+) ([!-~]+)$'
local NO_ENTRY = '^(%-) (%d+) ([!-~]+)$'
local MSG_ID = '^%d+%-%d+$'
local NUMBER_MOST = 1e15 -- a Lua number holds integers up to here, and Redis takes them as scores

-- A field that another program may have written, as a whole number; nil if it is none.
local function whole(value)
  local number = tonumber(match(value or '', '^%d+$'))
  return number and number < NUMBER_MOST and number or nil
end

-- The field `lease` as a table; false if it has another format. Many jobs of a call have the same value, so the tables
-- are cached. Numbers that are only passed on stay texts.
local parsed_leases = {
  [false] = { fence = 0, ver = 0, attempt = 0, max_attempts = '0', lost = '0', lease_until = '0', worker = '-' },
}

local function parse_lease(value)
  local lease = parsed_leases[value]
  if lease == nil then
    local fence, ver, attempt, max_attempts, lost, lease_until, worker = match(value, LEASE)
    lease = fence and fence + ver + attempt + max_attempts + lost + lease_until < NUMBER_MOST and {
      fence = tonumber(fence), ver = tonumber(ver), attempt = tonumber(attempt), max_attempts = max_attempts,
      lost = lost, lease_until = lease_until, worker = worker,
    } or false
    parsed_leases[value] = lease
  end
  return lease
end

-- A job from its hash fields status, lease, entry and ttl_s; or nil and why it cannot be read. Other gateways store
-- only the contract's fields, without lease and entry.
local function job_of(id, key, v)
  if not FINAL[v[1]] and not WAITS_OR_RUNS[v[1]] then
    return nil, 'job:' .. id .. ': status is ' .. string.sub(v[1], 1, 40)
  end
  local lease = parse_lease(v[2])
  local msg_id, created_ts, trace = '-', nil, '-'
  if v[3] then
    msg_id, created_ts, trace = match(v[3], ENTRY)
    if not msg_id then
      msg_id, created_ts, trace = match(v[3], NO_ENTRY)
    end
  else
    local created = call('HGET', key, 'created_ts')
    created_ts = whole(created) and created or NOW_S
  end
  if not lease or not msg_id or tonumber(created_ts) >= NUMBER_MOST then
    return nil, 'job:' .. id .. ': ' .. (lease and 'entry' or 'lease') .. ' has another format'
  end
  return {
    id = id, key = key, status = v[1], ttl_s = v[4], fence = lease.fence, ver = lease.ver, attempt = lease.attempt,
    max_attempts = lease.max_attempts, lost = lease.lost, lease_until = lease.lease_until, worker = lease.worker,
    msg_id = msg_id, created_ts = created_ts, trace = trace, entry = v[3], task = '',
  }
end

-- A job from its hash; nil if there is none, nil and the reason if it cannot be read.
local function read_job(id)
  if not is_id(id) then
    return nil, id == '' and 'the entry names no job_id' or 'the job_id is not a text of 1 to 256 bytes'
  end
  local key = job_key(id)
  local v = pcall('HMGET', key, 'status', 'lease', 'entry', 'ttl_s')
  if v.err then
    return nil, 'job:' .. id .. ' is a ' .. call('TYPE', key)['ok'] .. ', not a hash'
  elseif v[1] then
    return job_of(id, key, v)
  elseif call('EXISTS', key) == 1 then
    return nil, 'job:' .. id .. ' has no status'
  end
  return nil
end

-- Whether the stream has the entry; false also for an id that Redis does not accept, such as one of 30 digits.
local function has_entry(msg_id)
  local found = pcall('XRANGE', STREAM, msg_id, msg_id)
  return not found.err and found[1] ~= nil
end

local function lease_field(job)
  return text[job.fence] .. ' ' .. text[job.ver] .. ' ' .. text[job.attempt] .. ' '
    .. job.max_attempts .. ' ' .. job.lost .. ' ' .. job.lease_until .. ' ' .. job.worker
end

local function entry_field(job)
  return job.msg_id .. ' ' .. job.created_ts .. ' ' .. job.trace
end

-- Records a step of a job in the journal. The job is as the step left it; `prev_lease` and `prev_fence` (default: the
-- same fence) are as the step found them. `more` is the end of the line, from max_attempts on.
local function record(job, kind, task, from, to, prev_lease, worker, more, prev_fence)
  local fence = text[job.fence]
  add_line(job.id, '\t' .. kind .. '\t' .. text[job.ver] .. '\t' .. NOW_S .. '\t' .. task .. '\t' .. from .. '\t' .. to
    .. '\t' .. text[job.attempt] .. '\t' .. fence .. '\t' .. (prev_fence or fence) .. '\t' .. job.lease_until .. '\t'
    .. prev_lease .. '\t' .. worker .. '\t' .. (more or job.max_attempts))
end

-- The same for an event that changes no job: '' for the whole queue, or the id of a job that cannot be read.
local function record_no_job(id, kind, task, state, more)
  local none = { id = id, ver = 0, attempt = 0, fence = 0, lease_until = '0', max_attempts = '0' }
  record(none, kind, task, '', state, '0', '', more)
end

-- The end of a line: max_attempts, result hash, payload hash, error code, due, data.
local function more(max_attempts, result_h, payload_h, error_code, due, data)
  return max_attempts .. '\t' .. result_h .. '\t' .. payload_h .. '\t' .. error_code .. '\t' .. due
    .. '\t' .. data
end

local function count(name)
  counted[name] = (counted[name] or 0) + 1
end

-- The fence. The caller holds the lease if the job runs with its fence and token. If the lease has expired, the pending
-- list must not name another consumer for the entry either: a foreign worker that took it over writes no fence.
-- Returns nil, or why the lease is lost.
local function why_lost(job, unreadable, msg_id, fence, token)
  if not job then
    return unreadable or 'the job has expired or was removed'
  end
  if job.fence ~= fence or job.worker ~= token then
    return 'another worker holds the job (fence ' .. job.fence .. ', yours is ' .. fence .. ')'
  end
  if job.status ~= 'running' then
    return 'the job is ' .. job.status
  end
  if tonumber(job.lease_until) > NOW then
    return nil
  end
  local pending = pcall('XPENDING', STREAM, GROUP, msg_id, msg_id, '1')
  if pending[1] and pending[1][2] ~= token then
    return 'the stream entry was taken over by ' .. quarantine().printable(pending[1][2], 128)
  end
  return nil
end

-- Records in the journal that a stale holder was refused and nothing was changed.
local function reject(id, task, job, fence, token, why)
  local status = job and job.status or ''
  record({ id = id, ver = 0, attempt = 0, fence = fence, lease_until = '0' }, 'reject', task, status, status, '0',
    token, more('0', '', '', 'lease_lost', '0', why), job and text[job.fence] or '0')
  count('rejected')
end
