-- Promotes due jobs and takes back expired leases.

local function promote(most)
  local due = call('ZRANGEBYSCORE', DELAYED, '-inf', NOW_S, 'LIMIT', '0', text[most])
  if #due == 0 then
    return 0
  end
  each_many('ZREM', DELAYED, due)
  dirty.delayed = true
  for _, id in ipairs(due) do
    local key = JOB .. id
    local v = call('HMGET', key, 'state', 'gid')
    if v[1] and not STATES[v[1]] then
      read_job(id) -- it cannot be read, and is quarantined
    end
    if v[1] == 'delayed' then
      call('HSET', key, 'state', 'wait', 'updated_ms', NOW_S)
      join_lane(id, v[2], false)
      move(id, 'delayed', 'wait')
    else -- the job was deleted or is in another lane
      move(id, 'delayed', nil)
    end
  end
  return #due
end

local LEASE_LOST = '{"code":"lease_lost","message":"the lease ran out and no attempt is left","retryable":false}'

-- Records the end of an expired lease. The holder's token is no longer valid.
local function record_reap(job)
  record(job, 'reap', 'wait', job.attempt, '0', job.worker, '\t\tlease_lost')
  job.was, job.lease, job.token, job.taken_back = 'wait', '0', '', true
  count('lost')
end

-- Takes back one lease. `in_front`: a job without a delay goes to the front of its lane at once.
local function take_back(job, chance, in_front)
  ensure_known(job)
  if job.cancel then
    record_reap(job)
    return fail(job, { error = 'cancelled', error_json = '{"code":"cancelled","message":"cancelled"}',
      error_code = 'cancelled', worker = '-' }, 'cancel')
  end
  if job.attempt >= job.max_attempts then
    record_reap(job)
    return fail(job, { error = 'the lease ran out and no attempt is left', error_json = LEASE_LOST,
      error_code = 'lease_lost', worker = '-' }, 'bury', true)
  end
  local due = backoff_due(job, chance)
  job.token = ''
  requeue(job, { error_code = 'lease_lost' }, 'reap', job.attempt, in_front and due <= NOW and 0 or due, true)
end

-- The order in which our own claims gave out leases; their tokens contain it.
local function token_number(job)
  return tonumber(match(job.token, '%.(%d+)$')) or 0
end

local orphans = 0 -- 1 if an expired lease had no job

-- Returns the number of expired leases, and how many of their jobs have ended.
local function reap(most, chance, in_front)
  local ids = call('ZRANGEBYSCORE', ACTIVE, '-inf', NOW_S, 'LIMIT', '0', text[most])
  local jobs, ended = {}, 0
  for _, id in ipairs(ids) do
    local job = read_job(id)
    if job and job.state == 'active' then
      jobs[#jobs + 1] = job
    else -- without the hash its group is unknown, so the slots of all groups are counted anew
      active_off[#active_off + 1] = id
      move(id, 'active', nil)
      call('HINCRBY', BASE .. ':upkeep', 'recount', '1')
      orphans = 1
    end
  end
  if in_front then -- they are pushed to the front one by one, so the last one goes first
    table.sort(jobs, function(a, b) return token_number(a) > token_number(b) end)
  end
  for _, job in ipairs(jobs) do
    if job.cancel or job.attempt >= job.max_attempts then
      ended = ended + 1
    end
    take_back(job, chance, in_front)
  end
  if #ids > 0 then
    flush_groups()
    flush_finished()
  end
  return #ids, ended
end
