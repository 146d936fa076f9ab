-- Promotes due jobs and takes back expired leases. The script checks and acts in one step, so a lease that was just
-- extended is never taken away.
-- @include job
-- @include end
local LOST_CODE = 'lease_lost'

local function bury_lost(job, task)
  local body = '{"code":"' .. LOST_CODE .. '","message":"the lease ran out ' .. job.lost
    .. ' time(s) without an outcome: each worker that took the job died, hung or was cut off",'
    .. '"attempts":' .. job.attempt .. ',"retryable":false}'
  finish(job, task, 'error', 'bury', 'error', body, 'worker.lost', '{"error":' .. body .. '}',
    LOST_CODE, '')
end

-- Takes back an expired lease. The job waits again; it ends if its leases expired too often, or if its cancellation was
-- requested. Returns true if it is claimable; then the caller writes the hash.
local function reap(job, task, lost_max)
  local was = job.lease_until
  job.ver, job.lease_until, job.status = job.ver + 1, '0', 'queued'
  job.lost = text[tonumber(job.lost) + 1]
  record(job, 'reap', task, 'running', 'queued', was, job.worker)
  count('lost')
  job.worker = '-' -- so that the old holder is refused, although the fence is the same
  if call('HGET', job.key, 'cancel') == '1' then
    finish(job, task, 'canceled', 'cancel', 'error', '', 'worker.cancel', '{}', '', '')
    return false
  end
  local max_attempts = tonumber(job.max_attempts)
  if tonumber(job.lost) >= lost_max or (max_attempts > 0 and job.attempt >= max_attempts) then
    bury_lost(job, task)
    return false
  end
  return true
end

-- A released job keeps its pending entry. Its idle time is set to this, so that the next claim takes it at once.
local HANDED_BACK_MS = 86400000

local function hand_back(msg_id, consumer)
  pcall('XCLAIM', STREAM, GROUP, consumer, '0', msg_id, 'IDLE', text[HANDED_BACK_MS], 'JUSTID')
end

-- How long a foreign worker has been silent. It knows only the contract and writes no lease, so its signs of life are
-- the delivery of the entry, `updated_ts` and the job's events.
local function silent_ms(job, idle_ms)
  local updated = whole(call('HGET', job.key, 'updated_ts'))
  if updated and updated <= NOW + 60000 then -- times further in the future are ignored
    idle_ms = math.min(idle_ms, NOW - updated)
  end
  local event = pcall('XREVRANGE', job.key .. ':events', '+', '-', 'COUNT', '1')[1]
  local event_ms = event and whole(match(event[1], '^%d+'))
  if event_ms and event_ms <= NOW + 60000 then
    idle_ms = math.min(idle_ms, NOW - event_ms)
  end
  return idle_ms
end

-- Whether a worker holds the job of a pending entry: our own workers until the lease expires, foreign workers until
-- they have been silent for `foreign_ms`.
local function is_held(job, consumer, idle_ms, foreign_ms)
  if FINAL[job.status] then
    return false
  elseif job.status == 'running' and tonumber(job.lease_until) > NOW then
    return true
  elseif idle_ms >= HANDED_BACK_MS or (job.status == 'running' and job.worker == consumer) then
    return false
  end
  return silent_ms(job, idle_ms) < foreign_ms
end

-- Visits pending entries that have been idle for at least `idle_ms`, oldest first, at most 1,000 in pages. Its function
-- visit(msg_id, consumer, idle_ms) returns false to stop. After 1,000 entries, `field` of jobs:upkeep keeps the last
-- id, and the next search continues there: so entries that others hold for long do not hide those after them.
local function each_idle(field, idle_ms, visit)
  local kept = own('HGET', UPKEEP, field)
  local from = kept and match(kept, MSG_ID) and '(' .. kept or '-'
  local last
  for _ = 1, 10 do
    local page = pcall('XPENDING', STREAM, GROUP, 'IDLE', idle_ms, from, '+', '100')
    for _, entry in ipairs(page) do
      if visit(entry[1], entry[2], entry[3]) == false then
        return
      end
    end
    last = #page == 100 and page[100][1]
    if not last then
      break
    end
    from = '(' .. last
  end
  if last then
    own('HSET', UPKEEP, field, last)
  elseif kept then
    own('HDEL', UPKEEP, field)
  end
end

-- Creates the group if the server has lost it, at 0, so that no entry is skipped (S-11). Entries may be lost as well,
-- which upkeep restores.
local function ensure_group()
  own('XLEN', STREAM)
  if not pcall('XGROUP', 'CREATE', STREAM, GROUP, '0', 'MKSTREAM').err then
    quarantine().begin_repair('entries')
  end
end

-- Job id, task and payload of an entry. Another program may have written it, so control characters in the task are
-- replaced: they would break the journal's lines.
local clean_tasks = {}

local function fields_of(flat)
  if flat[1] == 'job_id' and clean_tasks[flat[4]] and flat[5] == 'payload' then
    return flat[2], flat[4], flat[6]
  end
  local id, task, payload = '', '', ''
  for i = 1, #flat, 2 do
    local name = flat[i]
    if name == 'job_id' then
      id = flat[i + 1]
    elseif name == 'task' then
      task = flat[i + 1]
    elseif name == 'payload' then
      payload = flat[i + 1]
    end
  end
  if string.find(task, '%c') then
    task = string.gsub(task, '%c', ' ')
  else
    clean_tasks[task] = true
  end
  return id, task, payload
end

-- S-19: the job's hash has expired. The entry is dropped, and the job is not made again.
local function expire(id, task, msg_id)
  drop_entry(msg_id)
  record_no_job(id, 'expire', task, 'expired')
  count('expired')
end

-- Moves due jobs into the stream; `limit` limits the time of one script.
local function promote(limit)
  local due = own('ZRANGEBYSCORE', DELAYED, '-inf', NOW_S, 'LIMIT', '0', limit)
  for _, id in ipairs(due) do
    local job, unreadable = read_job(id)
    if unreadable then
      quarantine_job(id, '-', unreadable)
    elseif job and job.status == 'queued' and job.msg_id == '-' then
      local v = call('HMGET', job.key, 'task', 'payload')
      job.msg_id = enqueue(id, v[1] or '', v[2] or '', 0)
      call('HSET', job.key, 'entry', entry_field(job), 'due_ms', '0')
    end
    call('ZREM', DELAYED, id)
  end
  return #due
end
