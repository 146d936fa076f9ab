-- Promotes due jobs and takes back leases that ran out. The condition is read and acted on in the same step, so a
-- lease that was extended a moment ago is never taken away.
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

-- A worker let the lease run out: the job waits again, or ends when that has happened too often or
-- its cancellation was requested. Returns true when it is claimable. The caller writes the hash.
local function reap(job, task, lost_max)
  local fence, was = text[job.fence], job.lease_until
  job.ver, job.lease_until, job.status = job.ver + 1, '0', 'queued'
  job.lost = text[tonumber(job.lost) + 1]
  note(job.id, 'reap', text[job.ver], task, 'running', 'queued', text[job.attempt], fence, fence, '0',
    was, job.worker, job.max_attempts)
  count('lost')
  job.worker = '-' -- the last holder proves nothing any more, even under the same fence
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

-- A job that was given back keeps its entry, made this old: the next claim takes it at once.
local HANDED_BACK_MS = 86400000

local function hand_back(msg_id, consumer)
  pcall('XCLAIM', STREAM, GROUP, consumer, '0', msg_id, 'IDLE', text[HANDED_BACK_MS], 'JUSTID')
end

-- For how long a holder that writes no lease has given no sign of life. It is a worker that knows only the
-- contract: its delivery, its `updated_ts` and its events are the signs.
local function silent_ms(job, idle_ms)
  local updated = whole(call('HGET', job.key, 'updated_ts'))
  if updated and updated <= NOW + 60000 then -- a clock that is further ahead proves nothing
    idle_ms = math.min(idle_ms, NOW - updated)
  end
  local event = pcall('XREVRANGE', job.key .. ':events', '+', '-', 'COUNT', '1')[1]
  local told = event and whole(match(event[1], '^%d+'))
  if told and told <= NOW + 60000 then
    idle_ms = math.min(idle_ms, NOW - told)
  end
  return idle_ms
end

-- Whether a worker holds the job of a pending entry. Our own workers are held to their lease, others to
-- `foreign_ms` since their last sign of life.
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

-- Group entries that have been idle for a lease, oldest first, at most 1,000 in pages; visit(msg_id, consumer,
-- idle_ms) returns false to stop. The next search goes on behind the last of 1,000, as `field` of jobs:upkeep
-- tells: entries that others hold for long do not hide those behind them.
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

-- A lost or restarted server may have no group: it is made at 0, so that nothing is skipped (S-11). With it
-- entries may have gone, which upkeep puts back.
local function ensure_group()
  own('XLEN', STREAM)
  if not pcall('XGROUP', 'CREATE', STREAM, GROUP, '0', 'MKSTREAM').err then
    quarantine().begin_repair('entries')
  end
end

-- What an entry says. Another program may have written it: nothing in it may break the journal's lines.
local checked = {}

local function fields_of(flat)
  if flat[1] == 'job_id' and checked[flat[4]] and flat[5] == 'payload' then
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
    checked[task] = true
  end
  return id, task, payload
end

-- S-19: the job outlived its time to live; it is counted and never revived.
local function expire(id, task, msg_id)
  drop_entry(msg_id)
  note(id, 'expire', '0', task, '', 'expired', '0', '0', '0', '0', '0', '', '0')
  count('expired')
end

-- Moves due jobs into the stream; `limit` bounds one script's time.
local function promote(limit)
  local due = own('ZRANGEBYSCORE', DELAYED, '-inf', NOW_S, 'LIMIT', '0', limit)
  for _, id in ipairs(due) do
    local job, unreadable = read_job(id)
    if unreadable then
      set_aside(id, '-', unreadable)
    elseif job and job.status == 'queued' and job.msg_id == '-' then
      local v = call('HMGET', job.key, 'task', 'payload')
      job.msg_id = enqueue(id, v[1] or '', v[2] or '', 0)
      call('HSET', job.key, 'entry', entry_words(job), 'due_ms', '0')
    end
    call('ZREM', DELAYED, id)
  end
  return #due
end
