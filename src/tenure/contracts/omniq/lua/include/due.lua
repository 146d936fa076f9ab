-- What time makes due: delayed jobs join their lane, leases that ran out are taken back.

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
      read_job(id) -- it cannot be read, and is set aside
    end
    if v[1] == 'delayed' then
      call('HSET', key, 'state', 'wait', 'updated_ms', NOW_S)
      join_lane(id, v[2], false)
      move(id, 'delayed', 'wait')
    else -- the job is gone or in another lane: the entry was left over
      move(id, 'delayed', nil)
    end
  end
  return #due
end

local LEASE_LOST = '{"code":"lease_lost","message":"the lease ran out and no attempt is left","retryable":false}'

-- The lease is over, and its holder proves nothing any more: what follows is not the holder's doing.
local function taken_back(job)
  record(job, 'reap', 'wait', job.attempt, '0', job.worker, '\t\tlease_lost')
  job.was, job.lease, job.token, job.taken_back = 'wait', '0', '', true
  count('lost')
end

-- Takes one lease back. `in_front`: a job without a delay goes to the front of its lane at once.
local function take_back(job, chance, in_front)
  first_sight(job)
  if job.cancel then
    taken_back(job)
    return fail(job, { error = 'cancelled', error_json = '{"code":"cancelled","message":"cancelled"}',
      error_code = 'cancelled', worker = '-' }, 'cancel')
  end
  if job.attempt >= job.max_attempts then
    taken_back(job)
    return fail(job, { error = 'the lease ran out and no attempt is left', error_json = LEASE_LOST,
      error_code = 'lease_lost', worker = '-' }, 'bury', true)
  end
  local due = backoff_due(job, chance)
  job.token = ''
  back(job, { error_code = 'lease_lost' }, 'reap', job.attempt, in_front and due <= NOW and 0 or due, true)
end

-- The order in which leases were given, for those that we gave: it is in the token.
local function given(job)
  return tonumber(match(job.token, '%.(%d+)$')) or 0
end

local orphans = 0 -- 1 when a lease that ended had no job

-- Returns how many leases had run out, and how many of them ended their job.
local function reap(most, chance, in_front)
  local ids = call('ZRANGEBYSCORE', ACTIVE, '-inf', NOW_S, 'LIMIT', '0', text[most])
  local jobs, ended = {}, 0
  for _, id in ipairs(ids) do
    local job = read_job(id)
    if job and job.state == 'active' then
      jobs[#jobs + 1] = job
    else -- no hash: which group's slot it held is unknown, so the groups are counted anew
      active_off[#active_off + 1] = id
      move(id, 'active', nil)
      call('HINCRBY', BASE .. ':upkeep', 'recount', '1')
      orphans = 1
    end
  end
  if in_front then -- pushed to the front one by one, the last goes first
    table.sort(jobs, function(a, b) return given(a) > given(b) end)
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

-- What each claimer took last, packed in a field of the hash `claims`.
local CLAIMS = BASE .. ':claims'

-- { number, at, seed, ids } of a packed claim; nil when there is none, or it was not written by a claim.
local function claim_of(packed)
  if not packed then
    return nil
  end
  local is_packed, claim = pcall(cmsgpack.unpack, packed)
  if not is_packed or type(claim) ~= 'table' or type(claim.number) ~= 'number' or type(claim.at) ~= 'number'
    or type(claim.seed) ~= 'string' or type(claim.ids) ~= 'table' then
    return nil
  end
  for _, id in ipairs(claim.ids) do
    if type(id) ~= 'string' then
      return nil
    end
  end
  return claim
end
