-- Takes up to `limit` leases: what is due is promoted, what ran out is taken back, then new entries
-- are read through the consumer group. Each claimed job is marked running in the same step.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- ARGV[1] namespace  ARGV[2] worker id (the consumer)  ARGV[3] limit  ARGV[4] lease_ms
-- ARGV[5] how often a lease may run out  ARGV[6] 1 after a lost answer
-- ARGV[7..] after a lost answer: the entries this worker knows it holds
-- Returns { state, now_ms, last stream id, last wake id, next due_ms, leases }; state is 'ok' or
--   'paused'; a lease is { msg_id, job_id, task, payload, attempt, max_attempts, fence, created_ts,
--   trace }
-- Clauses S-8 S-9 S-10 S-11 S-12 S-13 S-18 S-19 S-27 S-28
-- @include job
-- @include end
-- @include waiting
-- @include reap
local WORKER = ARGV[2]
local LIMIT = tonumber(ARGV[3])
local LEASE_MS = tonumber(ARGV[4])
local LOST_MAX = tonumber(ARGV[5])
local LEASE_UNTIL = text[NOW + LEASE_MS]
local STARTED = ',"worker":"' .. WORKER .. '"}'
-- How often, over all workers together, the pending list is searched for leases that ran out.
local SEARCH_EVERY_MS = math.min(1000, math.floor(LEASE_MS / 4))

local leases = {}

local function start(job, msg_id, task, payload)
  local was_fence, was_lease = text[job.fence], job.lease_until
  if job.ver == 0 then -- stored by a gateway that does not know the index
    call('ZADD', INDEX, 'NX', job.created_ts ~= '0' and job.created_ts or NOW_S, job.id)
  end
  job.fence, job.attempt, job.ver = job.fence + 1, job.attempt + 1, job.ver + 1
  job.lease_until, job.worker, job.msg_id = LEASE_UNTIL, WORKER, msg_id
  local attempt = text[job.attempt]
  call('HSET', job.key, 'status', 'running', 'updated_ts', NOW_S, 'lease', lease_words(job))
  emit(job.key, 'running', 'worker.start', '{"attempt":' .. attempt .. STARTED, job.ttl_s)
  note(job.id, 'claim', text[job.ver], task, 'queued', 'running', attempt, text[job.fence], was_fence,
    LEASE_UNTIL, was_lease, WORKER, job.max_attempts)
  leases[#leases + 1] = { msg_id, job.id, task, payload, job.attempt, tonumber(job.max_attempts),
    job.fence, job.created_ts, job.trace }
end

-- The answer that handed this lease to us was lost, so nobody ran the job: no attempt is spent.
local function give_back(job, task)
  local fence, was = text[job.fence], job.lease_until
  job.ver, job.attempt, job.lease_until, job.status = job.ver + 1, job.attempt - 1, '0', 'queued'
  note(job.id, 'release', text[job.ver], task, 'running', 'queued', text[job.attempt], fence, fence,
    '0', was, WORKER, job.max_attempts)
end

-- An entry of ours or somebody's, in whatever state its job is by now.
local function take(msg_id, flat, ours_unknown)
  local id, task, payload = fields_of(flat)
  local job = read_job(id)
  if not job then
    return expire(id, task, msg_id)
  end
  if FINAL[job.status] then -- S-18: a redelivered finished job is only acknowledged
    return drop_entry(msg_id)
  end
  if job.status == 'running' and ours_unknown and job.worker == WORKER then
    give_back(job, task)
  elseif job.status == 'running' then
    local held = tonumber(job.lease_until) > NOW
    if held and job.msg_id ~= msg_id then -- the same job enqueued twice
      return drop_entry(msg_id)
    end
    if not reap(job, task, LOST_MAX) then
      return drop_entry(msg_id)
    end
  elseif job.msg_id ~= '-' and job.msg_id ~= msg_id then -- superseded by a later entry
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

local function claimable(msg_id)
  local entry = call('XRANGE', STREAM, msg_id, msg_id)[1]
  local job = entry and read_job((fields_of(entry[2])))
  return not job or job.status ~= 'running' or tonumber(job.lease_until) <= NOW
end

local function take_back()
  if NOW < (tonumber(call('HGET', UPKEEP, 'search_at')) or 0) then
    return
  end
  local full = false
  each_idle(ARGV[4], function(msg_id)
    if #leases >= LIMIT then
      full = true
      return false
    end
    if claimable(msg_id) then
      take_over(msg_id, false)
    end
  end)
  call('HSET', UPKEEP, 'search_at', full and '0' or text[NOW + SEARCH_EVERY_MS])
end

-- S-28: the answer to an earlier claim was lost; what it took is handed out again.
local function recover()
  local held = {}
  for i = 7, #ARGV do
    held[ARGV[i]] = true
  end
  for _, entry in ipairs(call('XPENDING', STREAM, GROUP, '-', '+', '1000', WORKER)) do
    if #leases < LIMIT and not held[entry[1]] then
      take_over(entry[1], true)
    end
  end
end

local function read_new()
  while #leases < LIMIT do
    local wanted = LIMIT - #leases
    local reply = call('XREADGROUP', 'GROUP', GROUP, WORKER, 'COUNT', text[wanted], 'STREAMS', STREAM,
      '>')
    if not reply then
      return
    end
    local entries = reply[1][2]
    for _, entry in ipairs(entries) do
      take(entry[1], entry[2], false)
    end
    if #entries < wanted then
      return
    end
  end
end

-- Where a waiting worker listens from: nothing that is added after this moment is missed.
local function ends()
  local info = redis.pcall('XINFO', 'STREAM', STREAM)
  local last = '0-0'
  for i = 1, #info, 2 do
    if info[i] == 'last-generated-id' then
      last = info[i + 1]
    end
  end
  local woken = call('XREVRANGE', WAKE, '+', '-', 'COUNT', '1')[1]
  local due = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
  return last, woken and woken[1] or '0-0', tonumber(due[2]) or 0
end

if call('EXISTS', PAUSED) == 1 then
  local last, woken = ends()
  return { 'paused', NOW, last, woken, 0, {} }
end
call('ZADD', NS .. 'jobs:workers', NOW_S, WORKER)
ensure_group()
promote('1000')
if ARGV[6] == '1' then
  recover()
end
take_back()
read_new()
if #leases > 0 then
  counted['started'] = #leases
  flush()
  return { 'ok', NOW, '', '', 0, leases }
end
flush()
local last, woken, due = ends()
return { 'ok', NOW, last, woken, due, leases }
