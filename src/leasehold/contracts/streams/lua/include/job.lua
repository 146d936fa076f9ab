-- A job, however it came to be as it is: how it is read, written and noted.
--
-- Our own state of a job is two hash fields beside the contract's, words with "-" for none:
--   lease: fence ver attempt max_attempts lost lease_until worker_id    changes with every step
--   entry: msg_id created_ts trace                                      changes when it is queued again
-- The worker of a job that nobody has claimed yet is "+" if a claim must read `entry`: when it is not as
-- old as its job, or names a trace.
-- Two and not ten because a script pays for every field it reads, and these change together. Not one,
-- because Redis keeps a small hash in one piece only while no value is longer than 64 bytes. Numbers
-- become text once and not at every call: Redis formats a Lua number at ten times the cost of a text.
-- @include step
local FINAL = { done = true, error = true, canceled = true }

local text = setmetatable({}, {
  __index = function(cache, number)
    local made = format('%d', number)
    cache[number] = made
    return made
  end,
})

local function job_key(id)
  return JOB .. id
end

local function refresh(key, ttl_s)
  local at = ttl_s and end_of(ttl_s)
  if at then
    call('PEXPIREAT', key, at)
    call('PEXPIREAT', key .. ':events', at)
  end
end

local LEASE = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+)$'
local ENTRY = '^(%S+) (%d+) (%S+)$'

-- A job from its hash fields status, lease, entry and ttl_s. Numbers that only travel on stay texts.
local function job_of(id, key, v)
  local fence, ver, attempt, max_attempts, lost, lease_until, worker = match(v[2] or '', LEASE)
  local msg_id, created_ts, trace = match(v[3] or '', ENTRY)
  if not fence then -- stored by a gateway that knows only the contract's fields
    fence, ver, attempt, max_attempts, lost, lease_until = '0', '0', '0', '0', '0', '0'
    worker = '-'
  end
  if not msg_id then
    msg_id, trace = '-', '-'
    created_ts = match(call('HGET', key, 'created_ts') or '', '^%d+$') or NOW_S
  end
  return {
    id = id, key = key, status = v[1], ttl_s = v[4], fence = tonumber(fence), ver = tonumber(ver),
    attempt = tonumber(attempt), max_attempts = max_attempts, lost = lost,
    lease_until = lease_until, worker = worker, msg_id = msg_id, created_ts = created_ts,
    trace = trace, task = '',
  }
end

-- A job as its hash says; nil when there is none.
local function read_job(id)
  local key = job_key(id)
  local v = call('HMGET', key, 'status', 'lease', 'entry', 'ttl_s')
  return v[1] and job_of(id, key, v) or nil
end

local function lease_words(job)
  return text[job.fence] .. ' ' .. text[job.ver] .. ' ' .. text[job.attempt] .. ' '
    .. job.max_attempts .. ' ' .. job.lost .. ' ' .. job.lease_until .. ' ' .. job.worker
end

local function entry_words(job)
  return job.msg_id .. ' ' .. job.created_ts .. ' ' .. job.trace
end

-- `more` is the end of the line, from max_attempts on; what is not applicable is left off.
local function note(job_id, kind, ver, task, from, to, attempt, fence, prev_fence, lease,
    prev_lease, worker, more)
  add_line(job_id .. '\t' .. kind .. '\t' .. ver .. '\t' .. NOW_S .. '\t' .. task .. '\t'
    .. from .. '\t' .. to .. '\t' .. attempt .. '\t' .. fence .. '\t' .. prev_fence .. '\t' .. lease
    .. '\t' .. prev_lease .. '\t' .. worker .. '\t' .. more)
end

-- max_attempts, result hash, payload hash, error code, due, data
local function more(max_attempts, result_h, payload_h, error_code, due, data)
  return max_attempts .. '\t' .. result_h .. '\t' .. payload_h .. '\t' .. error_code .. '\t' .. due
    .. '\t' .. data
end

local function count(name)
  counted[name] = (counted[name] or 0) + 1
end
