-- Ends leases, each by its own outcome, in one step for the whole batch. An outcome sent again after a
-- lost answer gets the verdict it got before. Plain completions go through
-- complete-16.lua; this script does everything.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] worker id  ARGV[3] minutes of metrics to keep (0: none)
-- ARGV[4] jobs that the worker's own rate limiter allows ('' for none)
-- ARGV[5..7] keep count, age_s and limit of failed jobs that name none
-- ARGV[8..] per outcome: id, fence, token, kind (complete, retry, bury, snooze, release, cancel, limit, park),
--   value (result JSON or the reason), stacktrace (JSON array, '' to leave it), hash of the result,
--   error code, delay_ms (of a completion or park: before it is tried again when a child forbids it),
--   keep count, keep age_s, how many old ones to remove, attempts, most attempts for the journal, hash of the
--   token, what to do when children are pending (retry, bury), 1 for a job that goes to the front
-- Returns per outcome { verdict, due_ms } or { 'lost', reason }; verdict is the kind, 'retry' for a snooze
-- Clauses B-15 B-18 B-19 B-20 B-21 B-22 B-23 B-25 B-26 B-29 B-51
-- @include queue
local WORKER, METRICS = ARGV[2], tonumber(ARGV[3])
local WIDTH, FIRST = 17, 8
local HAS_LIMITER = ARGV[4] ~= '' or settings[3]
local RESTING = '9007199254740991' -- what the limiter counts while the queue rests, as BullMQ writes it

local verdicts, ids, freed, done = {}, {}, {}, {}
local with_children, promoted = {}, false

-- @include waiting
-- @include finish
METRICS_MAX, LIMIT_MAX = METRICS, tonumber(settings[3]) or tonumber(ARGV[4])
-- The verdict on an outcome that was accepted before; nil if this lease was not ended by us.
local function replayed(id, key, fence, kind)
  -- What an accepted outcome of each kind may have become, and the verdict that says so.
  local BECAME = {
    complete = { complete = 'complete', retry = 'retry', bury = 'bury' },
    retry = { retry = 'retry', bury = 'bury', cancel = 'cancel' },
    bury = { bury = 'bury' },
    snooze = { snooze = 'retry', cancel = 'cancel' },
    release = { release = 'release', cancel = 'cancel' },
    cancel = { cancel = 'cancel' },
    limit = { release = 'release', snooze = 'retry', cancel = 'cancel' },
    park = { park = 'retry', release = 'release', retry = 'retry', bury = 'bury', cancel = 'cancel' },
  }
  local tn = redis.pcall('HGET', key, 'tn')
  if type(tn) == 'table' then
    return nil
  end
  if not tn then
    for became, verdict in pairs(BECAME[kind]) do
      if type(redis.pcall('ZSCORE', ENDED, id .. ' ' .. fence .. ' ' .. became)) == 'string' then
        return { verdict, 0 }
      end
    end
    return nil
  end
  local _, _, _, old_fence, became, due = read_tn(tn)
  if old_fence ~= fence or became == '-' then
    return nil
  end
  local verdict = BECAME[kind][became]
  return verdict and { verdict, tonumber(due) } or { 'lost', 'the attempt was already settled: ' .. became }
end

local function reject(id, fence, why, token_h)
  local v = redis.pcall('HMGET', PREFIX .. id, 'name', 'ats', 'tn')
  local _, state = read_tn(v[3])
  note(plain(id), 'reject', '0', NOW_S, plain(v[1]), state, state, '0', fence, whole(v[2]) and v[2] or '0', '0', '0',
    WORKER, '0', '0', 'lease_lost', '', '', token_h, '0', 'settle')
  return { 'lost', why }
end

local function ends(job, o, to)
  o.to, o.prev, o.worker = to, 'active', WORKER
  finish(job, o)
  return { o.kind, 0 }
end

-- The outcomes that go back to the line, made when the first one comes.
local function outcomes()
  -- The job goes back: the hash remembers how the lease ended for an outcome that is sent again.
  local function back(job, o, kind, to, due, counts, event)
    local ver, fence = text[job.ver + 1], job.fence
    local atm = job.atm + (counts and 1 or 0)
    local fields = { 'tn', ver .. ' ' .. to .. ' 0 ' .. fence .. ' ' .. kind .. ' ' .. due }
    if counts then
      fields[#fields + 1], fields[#fields + 2] = 'atm', text[atm]
      fields[#fields + 1], fields[#fields + 2] = 'failedReason', o.value
      if o.stack ~= '' then
        fields[#fields + 1], fields[#fields + 2] = 'stacktrace', o.stack
      end
    end
    if to == 'delayed' then
      fields[#fields + 1], fields[#fields + 2] = 'delay', text[o.delay_ms]
    end
    call('HSET', job.key, unpack(fields))
    if event then
      emit('waiting', 'jobId', job.id, 'prev', 'active')
    end
    note(job.id, kind == 'park' and 'snooze' or kind, ver, NOW_S, job.name, 'active', to,
      text[atm + job.stc], fence, fence, '0',
      job.lease, WORKER, o.max_attempts, due, o.code, '', '', o.token_h, job.priority)
  end

  local function cancelled(job, o)
    o.to, o.kind, o.prev, o.worker = 'failed', 'cancel', 'active', WORKER
    o.value = o.value ~= '' and o.value ~= 'null' and o.value or 'cancelled'
    o.code, o.attempts = 'cancelled', '1000000'
    finish(job, o)
    return { 'cancel', 0 }
  end

  local function wait_again(job, o, kind, counts)
    if job.cancel then -- it would only start again to be stopped
      return cancelled(job, o)
    end
    if counts then -- what the contract's own words call it; BullMQ's readers ignore it
      emit('retry', 'jobId', job.id, 'delay', text[o.delay_ms], 'timestamp', NOW_S)
    end
    if o.delay_ms > 0 then
      local due = NOW + o.delay_ms
      delay(job.id, due)
      back(job, o, kind, 'delayed', text[due], counts, false)
      return { 'retry', due }
    end
    if counts and not promoted then -- as BullMQ does: what has become due stands before a retry
      promoted = true
      promote()
    end
    local priority = tonumber(job.priority)
    local to
    if not counts or (o.lifo and priority == 0) then
      to = wait_at_front(job.id, priority)
    else
      to = wait_at_end(job.id, priority)
    end
    back(job, o, kind, to, '0', counts, true)
    return { kind == 'release' and 'release' or 'retry', 0 }
  end

  -- Without a limiter nobody would look at the time to rest; then this job alone waits for it.
  local function limit(job, o)
    if not HAS_LIMITER or o.delay_ms <= 0 then
      return wait_again(job, o, 'snooze', false)
    end
    call('SET', LIMITER, RESTING, 'PX', text[o.delay_ms])
    o.delay_ms = 0
    return wait_again(job, o, 'release', false)
  end

  -- A parent that added children while it ran waits for them, and runs again when they are done; when
  -- they are done already, at once.
  local function park(job, o)
    o.delay_ms = 0
    if job.cancel or size('SCARD', job.key .. ':dependencies') == 0 then
      return wait_again(job, o, 'release', false)
    end
    put('ZADD', CHILDREN, NOW_S, job.id)
    emit('waiting-children', 'jobId', job.id, 'prev', 'active')
    back(job, o, 'park', 'waiting-children', '0', false, false)
    return { 'retry', 0 }
  end

  return {
    bury = function(job, o) return ends(job, o, 'failed') end,
    cancel = cancelled,
    retry = function(job, o) return wait_again(job, o, 'retry', true) end,
    snooze = function(job, o) return wait_again(job, o, 'snooze', false) end,
    release = function(job, o) return wait_again(job, o, 'release', false) end,
    limit = limit,
    park = park,
  }
end
local rarer
local function decide(job, o)
  if o.kind == 'complete' then
    return ends(job, o, 'completed')
  end
  rarer = rarer or outcomes()
  return rarer[o.kind](job, o)
end

local function decoded(json)
  local ok, told = pcall(cjson.decode, json or '')
  return ok and type(told) == 'table' and told or {}
end

-- The stacks of earlier attempts and one more entry, as JSON, cut to the job's limit.
local function with_stack(earlier, entry, limit)
  local stack = decoded(earlier)
  stack[#stack + 1] = entry
  while limit and #stack > math.max(0, limit) do
    table.remove(stack, 1)
  end
  local ok, json = pcall(cjson.encode, stack)
  return #stack > 0 and (ok and json or cjson.encode({ entry })) or '[]' -- NaN, which JSON has no word for, can be read
end

-- B-22: a parent can neither complete nor wait on when a child has failed it, nor complete while one is
-- pending; that is a failure.
local function refuse_children(key, o)
  if not with_children[key] then
    return
  end
  local id = key:sub(#PREFIX + 1)
  local name = 'Error'
  if o.kind == 'complete' and size('SCARD', key .. ':dependencies') > 0 then
    o.value, o.kind = 'Job ' .. id .. ' has pending dependencies. moveToFinished', o.otherwise
  elseif size('ZCARD', key .. ':unsuccessful') > 0 then
    o.value = 'Cannot complete job ' .. id .. ' because it has at least one failed child. moveToFinished'
    o.kind, name = 'bury', 'UnrecoverableError'
  else
    return
  end
  local v = call('HMGET', key, 'opts', 'stacktrace')
  local opts = decoded(v[1])
  o.stack = with_stack(v[2], name .. ': ' .. o.value, tonumber(opts.stackTraceLimit))
  if opts.removeOnFail == nil then
    o.keep_count, o.keep_age, o.keep_limit = ARGV[5], ARGV[6], ARGV[7]
  else
    o.keep_count, o.keep_age, o.keep_limit = more().keep_of(v[1], 'removeOnFail')
  end
  o.code, o.result_h = 'children', ''
end

-- The lock, the start and our own state of the job prove the lease where `active` was overwritten: the job stands
-- nowhere then.
local function is_held(id, fence, ats, state)
  return state == 'active' and ats == fence and not (call('LPOS', WAIT, id) or call('ZSCORE', PRIORITIZED, id)
    or call('ZSCORE', DELAYED, id) or call('ZSCORE', CHILDREN, id) or call('ZSCORE', COMPLETED, id)
    or call('ZSCORE', FAILED, id))
end

local function settle(at, lock)
  local id, fence, token = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local key = PREFIX .. id
  local kind, token_h = ARGV[at + 3], ARGV[at + 14]
  if done[id] or lock ~= token .. ':' .. fence then
    local before = replayed(id, key, fence, kind)
    if before then
      return before
    end
    return reject(id, fence, lock and 'another worker holds the job' or 'the lock has run out', token_h)
  end
  local v = redis.pcall('HMGET', key, 'name', 'atm', 'tn', 'parentKey', 'deid', 'stc', 'priority', 'cancel',
    'defa', 'parent', 'ats')
  if v.err then -- upkeep finds it without a lock and sets it aside
    freed[#freed + 1] = key .. ':lock'
    return reject(id, fence, 'the record of the job was overwritten: ' .. v.err, token_h)
  end
  if not v[1] then
    freed[#freed + 1] = key .. ':lock'
    return reject(id, fence, 'the job was removed', token_h)
  end
  local ver, state, lease = read_tn(v[3])
  if call('LREM', ACTIVE, '-1', id) == 0 and not is_held(id, fence, v[11], state) then
    return reject(id, fence, 'the job is not active', token_h)
  end
  done[id] = true
  freed[#freed + 1] = key .. ':lock'
  ids[#ids + 1] = id
  local o = {
    kind = kind, value = ARGV[at + 4], stack = ARGV[at + 5], result_h = ARGV[at + 6],
    code = ARGV[at + 7], delay_ms = tonumber(ARGV[at + 8]), keep_count = ARGV[at + 9],
    keep_age = ARGV[at + 10], keep_limit = ARGV[at + 11], attempts = ARGV[at + 12],
    max_attempts = ARGV[at + 13], token_h = token_h, otherwise = ARGV[at + 15], lifo = ARGV[at + 16] == '1',
  }
  refuse_children(key, o)
  return decide({
    id = id, key = key, name = plain(v[1]), atm = whole(v[2]) or 0, stc = whole(v[6]) or 0,
    fence = fence, ver = ver, state = 'active', lease = lease, parent_key = v[4], deid = v[5],
    priority = whole(v[7]) and v[7] or '0', cancel = v[8] == '1', defa = v[9], parent = v[10],
  }, o)
end
-- One command tells who holds what, another whether any job of the batch has children at all.
local locks, probes = {}, {}
for at = FIRST, #ARGV, WIDTH do
  local key = PREFIX .. ARGV[at]
  locks[#locks + 1] = key .. ':lock'
  if ARGV[at + 3] == 'complete' or ARGV[at + 3] == 'park' then
    local n = #probes
    probes[n + 1], probes[n + 2] = key .. ':dependencies', key .. ':unsuccessful'
  end
end
if #locks == 0 then
  return verdicts
end
locks = call('MGET', unpack(locks))
if #probes > 0 and call('EXISTS', unpack(probes)) > 0 then
  for i = 1, #probes, 2 do
    with_children[probes[i]:sub(1, -#':dependencies' - 1)] = true
  end
end

-- @include prove
for at = FIRST, #ARGV, WIDTH do
  local n = #verdicts + 1
  verdicts[n] = settle(at, locks[n])
end

if #freed > 0 then
  call('DEL', unpack(freed))
end
if #ids > 0 then
  redis.pcall('SREM', STALLED, unpack(ids))
  if CONCURRENCY and size('LLEN', WAIT) + size('ZCARD', PRIORITIZED) > 0 then
    wake() -- a slot of the whole queue is free again
  end
end
flush()
return verdicts
