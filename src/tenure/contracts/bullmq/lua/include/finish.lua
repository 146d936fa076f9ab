-- Ends a job for good, with all that follows from it. Few jobs have parents, deduplication or retention, and a script
-- pays for every function that it defines. So the functions for these are defined when the first job needs them.
local finished = { [COMPLETED] = {}, [FAILED] = {} } -- score, id, ... for each set
local finished_counts = { completed = 0, failed = 0 }
local METRICS_MAX = 0
local LIMIT_MAX -- jobs that the rate limiter allows
local some_ran = false -- a job that ran has ended
-- B-26: outcomes that removed their job are kept here for ten minutes, so that one that is sent again is recognised.
local REMOVED_SETTLES = PREFIX .. 'tenure:ended'
local removed_settles = {} -- score, id with fence and kind, ...
local to_wait = {} -- ids of new jobs for the end of `wait`

-- Finished jobs of a batch are added to their set together.
local function flush_finished()
  for set, flat in pairs(finished) do
    if #flat > 0 then
      each_many('ZADD', set, flat)
      finished[set] = {}
    end
  end
end

local function make_relations()
  -- @include parents
  -- @include store
  return {
    child_completed = child_completed, child_failed = child_failed, child_removed = child_removed,
    store_job = store_job, end_dedup = end_dedup, forget_dedup = forget_dedup, retain = retain,
    drop_jobs = drop_jobs, delete_job = delete_job, keep_of = keep_of,
  }
end
local relations_made
local function relations()
  relations_made = relations_made or make_relations()
  return relations_made
end

-- Calls a function of relations() for what the end of a job does to others. If it fails, the record that it failed on
-- is quarantined and the job ends all the same.
local function affect(name, record, ...)
  local ok, why = pcall(relations()[name], ...)
  if not ok then
    quarantine(record, type(why) == 'table' and why.err or tostring(why))
  end
end

-- B-29: counts finished jobs per minute, for as many minutes as the worker asked to keep.
local function count_minutes(to, n)
  local key = PREFIX .. 'metrics:' .. to
  local count = call('HINCRBY', key, 'count', text[n])
  local v = call('HMGET', key, 'prevTS', 'prevCount')
  local before = tonumber(v[1])
  if not before then
    return call('HSET', key, 'prevTS', NOW_S, 'prevCount', '0')
  end
  -- Minutes that have begun since. The first gets all that was counted up to now, the others none.
  local minutes = math.min(math.floor(NOW / 60000) - math.floor(before / 60000), METRICS_MAX)
  if minutes > 0 then
    local points = { text[count - n - (tonumber(v[2]) or 0)] }
    for i = 2, minutes do
      points[i] = '0'
    end
    each_many('LPUSH', key .. ':data', points)
    call('LTRIM', key .. ':data', '0', text[METRICS_MAX - 1])
    call('HSET', key, 'prevCount', text[count - n], 'prevTS', NOW_S)
  end
end

-- Writes made once at the end of a script that ended or stored jobs.
local function finish_all()
  if #to_wait > 0 then
    each_many('LPUSH', WAIT, to_wait)
    to_wait = {}
    wake()
  end
  flush_finished()
  if #removed_settles > 0 then
    pcall(each_many, 'ZADD', REMOVED_SETTLES, removed_settles)
  end
  if finished_counts.completed + finished_counts.failed == 0 then
    return
  end
  if METRICS_MAX > 0 then
    for to, n in pairs(finished_counts) do
      if n > 0 then
        pcall(count_minutes, to, n) -- a count may be lost, a job may not
      end
    end
  end
  -- B-19, as BullMQ's workers do it: no event while jobs wait for their time, a resume or the rate limiter.
  if some_ran and not IS_PAUSED
    and size('LLEN', WAIT) + size('LLEN', ACTIVE) + size('ZCARD', PRIORITIZED) + size('ZCARD', DELAYED) == 0
    and not (LIMIT_MAX and (tonumber(redis.pcall('GET', LIMITER)) or 0) >= LIMIT_MAX) then
    emit('drained')
  end
end
at_end = finish_all

-- `job` is what the caller has read: id, key, name, atm, stc, fence, ver, state, lease, parent_key, parent, deid, defa,
-- priority. `o` says how it ends: to, kind, value, result_h, code, stack, keep_count, keep_age, keep_limit, attempts,
-- max_attempts, worker, token_h, prev.
local function finish(job, o)
  local completed = o.to == 'completed'
  local set = completed and COMPLETED or FAILED
  local keep_count, keep_age = tonumber(o.keep_count), tonumber(o.keep_age)
  if job.parent_key then
    affect(completed and 'child_completed' or 'child_failed', job.parent_key, job.key, job.parent_key, job.parent,
      o.value)
  end
  if job.deid then
    affect('end_dedup', 'dn:' .. job.deid, job.id, job.deid)
  end
  local counts = o.prev == 'active' and 1 or 0 -- a job that never ran has made no attempt
  local atm = text[job.atm + counts]
  local ver = text[job.ver + 1]
  local fence = job.fence
  if keep_count == 0 then
    if job.parent_key then -- a failed child that the parent waits for: nothing is left to wait for
      affect('child_removed', job.parent_key, job.key, job.parent_key, job.parent)
    end
    relations().delete_job(job.key)
    local n = #removed_settles
    removed_settles[n + 1], removed_settles[n + 2] = NOW_S, job.id .. ' ' .. fence .. ' ' .. o.kind
  else
    local field = completed and 'returnvalue' or 'failedReason'
    local tn = ver .. ' ' .. o.to .. ' 0 ' .. fence .. ' ' .. o.kind .. ' 0'
    if o.stack and o.stack ~= '' then
      call('HSET', job.key, 'atm', atm, field, o.value, 'finishedOn', NOW_S, 'tn', tn, 'stacktrace', o.stack)
    else
      call('HSET', job.key, 'atm', atm, field, o.value, 'finishedOn', NOW_S, 'tn', tn)
    end
    if job.cancel or (job.defa and not completed) then
      call('HDEL', job.key, 'cancel', completed and 'cancel' or 'defa')
    end
    local flat = finished[set]
    flat[#flat + 1] = NOW_S
    flat[#flat + 1] = job.id
    if keep_age or keep_count then
      affect('retain', o.to, set, keep_count, keep_age, tonumber(o.keep_limit))
    end
  end
  local attempt = text[job.atm + job.stc + counts]
  note({ id = job.id, kind = o.kind, ver = ver, task = job.name, from = job.state, to = o.to, attempt = attempt,
    fence = fence, prev_lease = job.lease, worker = o.worker, max_attempts = o.max_attempts, error = o.code,
    result_h = o.result_h, token_h = o.token_h, priority = job.priority })
  if completed then
    emit('completed', 'jobId', job.id, 'returnvalue', o.value, 'prev', o.prev, 'timestamp', NOW_S)
  else
    emit('failed', 'jobId', job.id, 'failedReason', o.value, 'prev', o.prev, 'timestamp', NOW_S)
    if job.atm + 1 >= (tonumber(o.attempts) or 0) then
      emit('retries-exhausted', 'jobId', job.id, 'attemptsMade', atm)
    end
  end
  if keep_count == 0 then
    note({ id = job.id, kind = 'remove', ver = text[job.ver + 2], task = job.name, from = o.to, attempt = attempt,
      fence = fence })
  end
  finished_counts[o.to] = finished_counts[o.to] + 1
  some_ran = some_ran or counts == 1
end
