-- Stores jobs and makes them claimable in one step: idempotency, backpressure, hash, time to live, first event,
-- queue entry, journal. So a crash cannot leave a job that is stored but not queued.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] maximum depth (0: none)  ARGV[3] idempotency ttl_s
-- ARGV[4..] per job: job_id, task, payload, ttl_s, max_attempts, idempotency key, request hash,
--   requester, delay_ms, trace, payload hash; max_attempts 0 and trace '-' mean none
-- Returns per job { 'created' | 'replayed' | 'conflict' | 'full', job_id, created_ts if created }
-- Clauses S-1 S-2 S-3 S-4 S-5 S-6 S-24 S-25 S-26
-- @include step
local DEPTH_MAX = tonumber(ARGV[2])
local IDEM_TTL_S = tonumber(ARGV[3])
local WIDTH = 11

-- Waiting, running and delayed jobs. The stream's length is never less than the first two together, so most submits
-- need no exact count. It is needed if a foreign worker acknowledges entries without deleting them.
local used = own('XLEN', STREAM) + own('ZCARD', DELAYED)
if DEPTH_MAX > 0 and used >= DEPTH_MAX then
  -- Entries that no worker has received. Redis 7 counts them (`lag`) unless deletions made the count uncertain. Then
  -- entries after the group's last one are counted, up to `at_most`.
  local function undelivered(at_most)
    local groups = pcall('XINFO', 'GROUPS', STREAM)
    if groups.err or #groups == 0 then
      return call('XLEN', STREAM)
    end
    for _, flat in ipairs(groups) do
      local group = {}
      for i = 1, #flat, 2 do
        group[flat[i]] = flat[i + 1]
      end
      if group['name'] == GROUP then
        if group['lag'] then
          return group['lag']
        end
        return #call('XRANGE', STREAM, '(' .. group['last-delivered-id'], '+', 'COUNT', at_most)
      end
    end
    return call('XLEN', STREAM)
  end

  local pending = pcall('XPENDING', STREAM, GROUP)
  local running = (not pending.err and pending[1]) or 0
  used = undelivered(DEPTH_MAX) + running + call('ZCARD', DELAYED)
end
local created = 0
local answers = {}

local function known(job_id, idem, request_h)
  local kept = idem ~= '' and own('GET', NS .. 'idempotency:' .. idem)
  -- The value is the job id, as the contract says. (Before 0.1 a hash followed.)
  local old_id = kept and match(kept, '^[!-~]+')
  local v = old_id and pcall('HMGET', JOB .. old_id, 'request_h', 'status')
  if v and v[2] then -- otherwise the job has expired, and the key is free again
    -- Other gateways store no request_h: then any request with this key is a replay.
    return { (not v[1] or v[1] == request_h) and 'replayed' or 'conflict', old_id }
  end
  local key = JOB .. job_id
  if call('EXISTS', key) == 1 then
    local old_h = pcall('HGET', key, 'request_h') -- missing if another program stored the job
    return { old_h == request_h and 'replayed' or 'conflict', job_id }
  end
  return nil
end

local function store(at)
  local id, task, payload, ttl_s = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local max_attempts, idem, request_h = ARGV[at + 4], ARGV[at + 5], ARGV[at + 6]
  local requester, delay_ms, trace = ARGV[at + 7], tonumber(ARGV[at + 8]), ARGV[at + 9]
  local answer = known(id, idem, request_h)
  if answer then
    return answer
  end
  if DEPTH_MAX > 0 and used + created >= DEPTH_MAX then
    return { 'full', id }
  end
  local key = JOB .. id
  local due = delay_ms > 0 and NOW + delay_ms or 0
  local due_s = due > 0 and format('%d', due) or '0'
  local msg_id = enqueue(id, task, payload, due)
  local worker = due == 0 and trace == '-' and '-' or '+' -- see job.lua
  -- Redis searches small hashes from the front, so the fields that scripts use most come first.
  call('HSET', key, 'status', 'queued', 'lease', '0 1 0 ' .. max_attempts .. ' 0 0 ' .. worker, 'ttl_s', ttl_s,
    'updated_ts', NOW_S, 'result', '', 'entry', msg_id .. ' ' .. NOW_S .. ' ' .. trace, 'job_id', id,
    'created_ts', NOW_S, 'task', task, 'payload', payload, 'error', '', 'request_h', request_h,
    'requester', requester, 'due_ms', due_s)
  emit(key, 'queued', 'gateway.enqueue', '{}', ttl_s, wait_until(due, ttl_s))
  if idem ~= '' then
    call('SET', NS .. 'idempotency:' .. idem, id, 'EX',
      format('%d', math.max(tonumber(ttl_s), IDEM_TTL_S)))
  end
  own('ZADD', INDEX, NOW_S, id)
  add_line(id, '\tsubmit\t1\t' .. NOW_S .. '\t' .. task .. '\t\tqueued\t0\t0\t0\t0\t0\t\t'
    .. max_attempts .. '\t\t' .. ARGV[at + 10] .. '\t\t' .. due_s .. '\t')
  created = created + 1
  return { 'created', id, NOW }
end

for at = 4, #ARGV, WIDTH do
  answers[#answers + 1] = store(at)
end
if created > 0 then
  own('HINCRBY', STATS, 'submitted', format('%d', created))
end
flush()
return answers
