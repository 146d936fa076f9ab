-- Every outcome that settle-16.lua does not settle itself: failures, retries, releases, parents and children,
-- deduplication, bounds on finished jobs, and outcomes that are sent again after a lost reply.
-- The including script has FIRST, WIDTH and `answers`.
-- @include step
local WORKER = ARGV[2]
local HAS_LIMITER = ARGV[6] ~= '' or settings[3]
local RESTING = '9007199254740991' -- BullMQ's value of the limiter while the queue rests

local ids, freed_locks, done = {}, {}, {}
local with_children, has_promoted = {}, false

-- @include enqueue
-- @include finish
-- @include reject
METRICS_MAX, LIMIT_MAX = tonumber(ARGV[5]), tonumber(settings[3]) or tonumber(ARGV[6])
local THREE, EIGHT = '^(.-)\t(.-)\t(.*)$', '^' .. ('(.-)\t'):rep(7) .. '(.*)$' -- words joined by tabs

-- B-26: the verdict that an accepted outcome got before; nil if this lease was not ended by one of ours.
local function earlier_verdict(id, key, fence, kind)
  -- What an accepted outcome of each kind may have become, and its verdict.
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
      if type(redis.pcall('ZSCORE', REMOVED_SETTLES, id .. ' ' .. fence .. ' ' .. became)) == 'string' then
        return { verdict, 0 }
      end
    end
    return nil
  end
  local _, _, _, settled = read_tn(tn)
  local old_fence, became, due = match(settled, '^(%d+) (%S+) (%d+)$')
  if old_fence ~= fence or became == '-' then
    return nil
  end
  local verdict = BECAME[kind][became]
  return verdict and { verdict, tonumber(due) } or { 'lost', 'the attempt was already settled: ' .. became }
end

local function end_job(job, o, to)
  o.to, o.prev, o.worker = to, 'active', WORKER
  finish(job, o)
  return { o.kind, 0 }
end

-- All kinds but `complete`. These functions are defined when the first such outcome is met.
local function make_kinds()
  -- Writes the hash and the journal of a job that waits again. `tn` keeps how the lease ended, for an outcome that is
  -- sent again.
  local function write_back(job, o, kind, to, due, counts, event)
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
    if job.cancel then -- B-36: it would only start again to be stopped
      return cancelled(job, o)
    end
    if counts then -- the contract's own event; BullMQ's readers ignore it
      emit('retry', 'jobId', job.id, 'delay', text[o.delay_ms], 'timestamp', NOW_S)
    end
    if o.delay_ms > 0 then
      local due = NOW + o.delay_ms
      delay(job.id, due)
      write_back(job, o, kind, 'delayed', text[due], counts, false)
      return { 'retry', due }
    end
    if counts and not has_promoted then -- as in BullMQ: jobs that are due go before a retry
      has_promoted = true
      promote()
    end
    local priority = tonumber(job.priority)
    local to
    if not counts or (o.lifo and priority == 0) then
      to = wait_at_front(job.id, priority)
    else
      to = wait_at_end(job.id, priority)
    end
    write_back(job, o, kind, to, '0', counts, true)
    return { kind == 'release' and 'release' or 'retry', 0 }
  end

  -- B-51: only workers with a limiter honour the time to rest. Without one this job alone waits.
  local function limit(job, o)
    if not HAS_LIMITER or o.delay_ms <= 0 then
      return wait_again(job, o, 'snooze', false)
    end
    call('SET', LIMITER, RESTING, 'PX', text[o.delay_ms])
    o.delay_ms = 0
    return wait_again(job, o, 'release', false)
  end

  -- B-51: a parent that added children while it ran waits for them. It runs again when they have ended, at once if
  -- they have ended already.
  local function park(job, o)
    o.delay_ms = 0
    if job.cancel or size('SCARD', job.key .. ':dependencies') == 0 then
      return wait_again(job, o, 'release', false)
    end
    put('ZADD', CHILDREN, NOW_S, job.id)
    emit('waiting-children', 'jobId', job.id, 'prev', 'active')
    write_back(job, o, 'park', 'waiting-children', '0', false, false)
    return { 'retry', 0 }
  end

  return {
    bury = function(job, o) return end_job(job, o, 'failed') end,
    cancel = cancelled,
    retry = function(job, o) return wait_again(job, o, 'retry', true) end,
    snooze = function(job, o) return wait_again(job, o, 'snooze', false) end,
    release = function(job, o) return wait_again(job, o, 'release', false) end,
    limit = limit,
    park = park,
  }
end
local kinds
local function apply(job, o)
  if o.kind == 'complete' then
    return end_job(job, o, 'completed')
  end
  kinds = kinds or make_kinds()
  return kinds[o.kind](job, o)
end

-- B-20: the stacks of earlier attempts and one more entry, as JSON, cut to the job's limit and to ours.
local STACKS_MAX = 100
local function with_stack(earlier, entry, limit)
  local stack = decoded(earlier)
  stack[#stack + 1] = entry
  local most = math.floor(math.max(0, math.min(limit or STACKS_MAX, STACKS_MAX)))
  stack = { unpack(stack, math.max(1, #stack - most + 1)) }
  local ok, json = pcall(cjson.encode, stack)
  return #stack > 0 and (ok and json or cjson.encode({ entry })) or '[]' -- cjson reads NaN but cannot write it
end

-- B-22: turns the outcome into a failure if a failed child forbids the parent to complete or to wait for others, or a
-- pending child forbids it to complete.
local function check_children(key, o)
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
    o.keep_count, o.keep_age, o.keep_limit = relations().keep_of(v[1], 'removeOnFail')
  end
  o.code, o.result_h = 'children', ''
end

-- Whether the lease is valid although `active` does not list the job, because that key was overwritten (B-55). The
-- lock, the fence and our own state of the job must say so, and no other list may have the job.
local function is_held(id, fence, ats, state)
  return state == 'active' and ats == fence and not (call('LPOS', WAIT, id) or call('ZSCORE', PRIORITIZED, id)
    or call('ZSCORE', DELAYED, id) or call('ZSCORE', CHILDREN, id) or call('ZSCORE', COMPLETED, id)
    or call('ZSCORE', FAILED, id))
end

local function settle(at, lock)
  local id, fence, kind, value, result_h, stack, keep, rest = unpack(ARGV, at, at + WIDTH - 1)
  local key = PREFIX .. id
  local token, token_h, delay_ms, attempts, max_attempts, otherwise, lifo, code = match(rest, EIGHT)
  local keep_count, keep_age, keep_limit = match(keep, THREE)
  if done[id] or lock ~= token .. ':' .. fence then
    local before = earlier_verdict(id, key, fence, kind)
    if before then
      return before
    end
    return reject_by_lock('settle', id, fence, token_h, lock)
  end
  local v = redis.pcall('HMGET', key, 'name', 'atm', 'tn', 'parentKey', 'deid', 'stc', 'priority', 'cancel',
    'defa', 'parent', 'ats')
  if v.err then -- upkeep finds the job without a lock and quarantines it
    freed_locks[#freed_locks + 1] = key .. ':lock'
    return reject('settle', id, fence, token_h, 'the record of the job was overwritten: ' .. v.err)
  end
  if not v[1] then
    freed_locks[#freed_locks + 1] = key .. ':lock'
    return reject('settle', id, fence, token_h, 'the job was removed')
  end
  local ver, state, lease = read_tn(v[3])
  if call('LREM', ACTIVE, '-1', id) == 0 and not is_held(id, fence, v[11], state) then
    return reject('settle', id, fence, token_h, 'the job is not active')
  end
  done[id] = true
  freed_locks[#freed_locks + 1] = key .. ':lock'
  ids[#ids + 1] = id
  local o = {
    kind = kind, value = value, result_h = result_h, stack = stack, code = code,
    delay_ms = tonumber(delay_ms), keep_count = keep_count, keep_age = keep_age, keep_limit = keep_limit,
    attempts = attempts, max_attempts = max_attempts, token_h = token_h, otherwise = otherwise, lifo = lifo == '1',
  }
  check_children(key, o)
  return apply({
    id = id, key = key, name = plain(v[1]), atm = whole(v[2]) or 0, stc = whole(v[6]) or 0,
    fence = fence, ver = ver, state = 'active', lease = lease, parent_key = v[4], deid = v[5],
    priority = whole(v[7]) and v[7] or '0', cancel = v[8] == '1', defa = v[9], parent = v[10],
  }, o)
end

-- Settles the outcomes whose arguments begin at these positions of ARGV, and fills in `answers`.
local function settle_all(positions)
  -- One command reads all locks, another tells whether any of the jobs has children.
  local locks, probes = {}, {}
  for n, at in ipairs(positions) do
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
  check_types()
  for n, at in ipairs(positions) do
    answers[(at - FIRST) / WIDTH + 1] = settle(at, locks[n])
  end
  if #freed_locks > 0 then
    call('DEL', unpack(freed_locks))
  end
  if #ids > 0 then
    redis.pcall('SREM', STALLED, unpack(ids))
    if CONCURRENCY and size('LLEN', WAIT) + size('ZCARD', PRIORITIZED) > 0 then
      wake() -- B-14: a slot of the queue's global concurrency is free again
    end
  end
  flush()
end
