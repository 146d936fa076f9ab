-- What every script of this contract shares: the keys in their fixed order, the store's clock, how a
-- job is read, and the writes of every step (the job's own event, its time to live, the journal).
-- ARGV[1] is the namespace that stands before every key ('' for the contract's exact names).
--
-- Our own state of a job is one hash field, `lease`, beside the contract's: ten words, "-" for none:
--   fence ver attempt max_attempts lost lease_until worker_id msg_id created_ts trace
-- One field because a script pays for every field it reads, and most of them change together. Numbers
-- become text once and not at every call: Redis formats a Lua number at ten times the cost of a text.
local STREAM, JOURNAL, DELAYED, WAKE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local UPKEEP, STATS, INDEX, PAUSED, WORKERS = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local NS = ARGV[1]
local GROUP = 'workers'
local call = redis.call
local clock = call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOW_S = string.format('%.0f', NOW)

local FINAL = { done = true, error = true, canceled = true }

local text = setmetatable({}, {
  __index = function(cache, number)
    local made = string.format('%.0f', number)
    cache[number] = made
    return made
  end,
})

local function job_key(id)
  return NS .. 'job:' .. id
end

-- S-7: every event gives the job and its stream their whole time to live again.
local function refresh(key, events, ttl_s)
  if ttl_s then
    call('EXPIRE', key, ttl_s)
    call('EXPIRE', events, ttl_s)
  end
end

local function emit(key, kind, step, data, ttl_s)
  local events = key .. ':events'
  call('XADD', events, '*', 'type', kind, 'ts', NOW_S, 'step', step, 'data', data)
  refresh(key, events, ttl_s)
end

local match = string.match
local LEASE = '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+) (%S+) (%d+) (%S+)$'

-- A job from its hash fields status, lease and ttl_s. Numbers that only travel on stay texts.
local function job_of(id, key, v)
  local fence, ver, attempt, max_attempts, lost, lease_until, worker, msg_id, created_ts, trace
  if v[2] then
    fence, ver, attempt, max_attempts, lost, lease_until, worker, msg_id, created_ts, trace =
      match(v[2], LEASE)
  end
  if not fence then -- stored by a gateway that knows only the contract's fields
    fence, ver, attempt, max_attempts, lost, lease_until = '0', '0', '0', '0', '0', '0'
    worker, msg_id, trace = '-', '-', '-'
    created_ts = match(call('HGET', key, 'created_ts') or '', '^%d+$') or NOW_S
  end
  return {
    id = id, key = key, status = v[1], ttl_s = v[3], fence = tonumber(fence), ver = tonumber(ver),
    attempt = tonumber(attempt), max_attempts = max_attempts, lost = lost,
    lease_until = lease_until, worker = worker, msg_id = msg_id, created_ts = created_ts,
    trace = trace, task = '',
  }
end

-- A job as its hash says; nil when there is none.
local function read_job(id)
  local key = job_key(id)
  local v = call('HMGET', key, 'status', 'lease', 'ttl_s')
  return v[1] and job_of(id, key, v) or nil
end

local function lease_words(job)
  return text[job.fence] .. ' ' .. text[job.ver] .. ' ' .. text[job.attempt] .. ' '
    .. job.max_attempts .. ' ' .. job.lost .. ' ' .. job.lease_until .. ' ' .. job.worker .. ' '
    .. job.msg_id .. ' ' .. job.created_ts .. ' ' .. job.trace
end

-- The journal. Events gather while a script runs and leave as one entry at its end, so that history
-- costs a text and not a command. `lines` alternates field name and event; journal.py reads it.
local lines = {}
local lines_n = 0

local function add_line(line)
  lines[lines_n + 1] = 'e'
  lines_n = lines_n + 2
  lines[lines_n] = line
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

local counted = {}

local function count(name)
  counted[name] = (counted[name] or 0) + 1
end

-- Every script ends here: what it noted and counted is written.
local function flush()
  for from = 1, lines_n, 200 do
    call('XADD', JOURNAL, '*', unpack(lines, from, math.min(from + 199, lines_n)))
  end
  for name, n in pairs(counted) do
    call('HINCRBY', STATS, name, text[n])
  end
end

-- Wakes workers that wait with an empty queue, for what does not show in the stream itself.
local function wake()
  call('XADD', WAKE, 'MAXLEN', '1', '*', 'w', '1')
end
