-- Every outcome that settle-16.lua does not settle itself: failures, retries, releases, parents and children,
-- deduplication, bounds on finished jobs, and outcomes that are sent again after a lost answer.
-- The including script has FIRST, WIDTH and `answers`.
-- @include queue
local WORKER = ARGV[2]
local HAS_LIMITER = ARGV[6] ~= '' or settings[3]
local RESTING = '9007199254740991' -- what the limiter counts while the queue rests, as BullMQ writes it

local ids, freed, done = {}, {}, {}
local with_children, promoted = {}, false

-- @include waiting
-- @include finish
METRICS_MAX, LIMIT_MAX = tonumber(ARGV[5]), tonumber(settings[3]) or tonumber(ARGV[6])
local THREE, EIGHT = '^(.-)\t(.-)\t(.*)$', '^' .. ('(.-)\t'):rep(7) .. '(.*)$' -- fields joined by tabs

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
  note({ id = id, kind = 'reject', task = v[1], from = state, to = state, fence = fence,
    prev_fence = whole(v[2]) and v[2] or '0', worker = WORKER, error = 'lease_lost', token_h = token_h,
    data = 'settle' })
  return { 'lost', why }
end

local function ends(job, o, to)
  o.to, o.prev, o.worker = to, 'active', WORKER
  finish(job, o)
  return { o.kind, 0 }
end

-- The outcomes after which a job waits again, made when the first one comes.
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
    note({ id = job.id, kind = kind == 'park' and 'snooze' or kind, ver = ver, task = job.name, from = 'active',
      to = to, attempt = text[atm + job.stc], fence = fence, prev_lease = job.lease, worker = WORKER,
      max_attempts = o.max_attempts, due = due, error = o.code, token_h = o.token_h, priority = job.priority })
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
    o.keep_count, o.keep_age, o.keep_limit = match(ARGV[7], THREE)
  else
    o.keep_count, o.keep_age, o.keep_limit = family().keep_of(v[1], 'removeOnFail')
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
  local id, fence, kind = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local key = PREFIX .. id
  local token, token_h, delay_ms, attempts, max_attempts, otherwise, lifo, code = match(ARGV[at + 7], EIGHT)
  local keep_count, keep_age, keep_limit = match(ARGV[at + 6], THREE)
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
    kind = kind, value = ARGV[at + 3], result_h = ARGV[at + 4], stack = ARGV[at + 5], code = code,
    delay_ms = tonumber(delay_ms), keep_count = keep_count, keep_age = keep_age, keep_limit = keep_limit,
    attempts = attempts, max_attempts = max_attempts, token_h = token_h, otherwise = otherwise, lifo = lifo == '1',
  }
  refuse_children(key, o)
  return decide({
    id = id, key = key, name = plain(v[1]), atm = whole(v[2]) or 0, stc = whole(v[6]) or 0,
    fence = fence, ver = ver, state = 'active', lease = lease, parent_key = v[4], deid = v[5],
    priority = whole(v[7]) and v[7] or '0', cancel = v[8] == '1', defa = v[9], parent = v[10],
  }, o)
end

-- Settles the outcomes whose arguments begin at these places, and says so in `answers`.
local function settle_others(places)
  -- One command tells who holds what, another whether any of the jobs has children at all.
  local locks, probes = {}, {}
  for n, at in ipairs(places) do
    local key = PREFIX .. ARGV[at]
    locks[n] = key .. ':lock'
    if ARGV[at + 2] == 'complete' or ARGV[at + 2] == 'park' then
      probes[#probes + 1], probes[#probes + 2] = key .. ':dependencies', key .. ':unsuccessful'
    end
  end
  locks = call('MGET', unpack(locks))
  if #probes > 0 and call('EXISTS', unpack(probes)) > 0 then
    for i = 1, #probes, 2 do
      with_children[probes[i]:sub(1, -#':dependencies' - 1)] = true
    end
  end
  prove()
  for n, at in ipairs(places) do
    answers[(at - FIRST) / WIDTH + 1] = settle(at, locks[n])
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
end
