-- Reclaims jobs in `active` whose lock is gone (B-28). BullMQ's workers can neither extend nor settle without the lock,
-- so no lease is taken from a worker that still has it. The check and the reclaim are one step.

-- The job goes to the front of `wait`. If its lease ran out too often, or if it is to be cancelled, it gets a deferred
-- failure, and the next pickup fails it (B-17). Returns whether there was a job.
local function reap(id, stalled_max)
  local key = PREFIX .. id
  call('LREM', ACTIVE, '1', id)
  local v = redis.pcall('HMGET', key, 'name', 'atm', 'stc', 'ats', 'tn', 'workerId', 'priority', 'cancel')
  if v.err then
    quarantine(id, 'its key is a ' .. call('TYPE', key).ok .. ', not a hash')
    return false
  end
  if not v[1] then
    return false -- B-27
  end
  local ver, _, lease = read_tn(v[5])
  local atm, stc = whole(v[2]) or 0, whole(v[3]) or 0
  stc = stc + 1
  local tn = text[ver + 1] .. ' waiting 0 0 - 0'
  local cancelled = v[8] == '1'
  if cancelled or stc > stalled_max then
    local why = cancelled and 'cancelled' or 'job stalled more than allowable limit'
    call('HSET', key, 'stc', text[stc], 'tn', tn, 'defa', why)
  else
    call('HSET', key, 'stc', text[stc], 'tn', tn)
  end
  put('RPUSH', WAIT, id)
  wake()
  emit('waiting', 'jobId', id, 'prev', 'active')
  emit('stalled', 'jobId', id, 'timestamp', NOW_S)
  note({ id = id, kind = 'reap', ver = text[ver + 1], task = v[1], from = 'active', to = 'waiting',
    attempt = text[atm + stc], fence = whole(v[4]) and v[4], prev_lease = lease, worker = plain(v[6]),
    priority = whole(v[7]) and v[7] })
  return true
end

-- Goes through `active` from the newest to the oldest, so that the oldest ends up first in `wait`.
local function reap_lockless(stalled_max)
  local ids = call('LRANGE', ACTIVE, '0', '-1')
  local reaped = 0
  for from = 1, #ids, 100 do
    local keys = {}
    for i = from, math.min(from + 99, #ids) do
      keys[#keys + 1] = PREFIX .. ids[i] .. ':lock'
    end
    local locks = call('MGET', unpack(keys)) -- nil also for a key of another type, which is no lock
    for i, lock in ipairs(keys) do
      if not locks[i] then
        local id = ids[from + i - 1]
        call('DEL', lock)
        redis.pcall('SREM', STALLED, id)
        if reap(id, stalled_max) then
          reaped = reaped + 1
        end
      end
    end
  end
  return reaped
end
