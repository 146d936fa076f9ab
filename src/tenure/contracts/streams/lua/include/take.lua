-- The general path of claim: an entry of a job in any state, expired leases, leases of a lost answer. Claim includes it
-- inside a function. It uses what claim defines before.
-- @include reap
local LEASE_MS = tonumber(ARGV[4])
local LOST_MAX = tonumber(ARGV[5])
local FOREIGN_MS = tonumber(ARGV[7])
-- How often all workers together search the pending list for expired leases.
local SEARCH_EVERY_MS = math.min(1000, math.floor(LEASE_MS / 4))
-- A job whose lease expired this often is a suspect: it may be killing its workers (S-13). A worker runs at most one
-- suspect at a time. If several jobs were running when a worker died, the next death shows which one is to blame.
local SUSPECT_FROM = 2

local function start(job, msg_id, task, payload)
  local was_fence, was_lease = text[job.fence], job.lease_until
  if job.ver == 0 then -- stored by another gateway, which does not write the index
    own('ZADD', INDEX, 'NX', job.created_ts, job.id)
  end
  job.fence, job.attempt, job.ver = job.fence + 1, job.attempt + 1, job.ver + 1
  job.lease_until, job.worker = LEASE_UNTIL_S, WORKER
  local lease, entry = lease_field(job), job.entry
  if job.msg_id == msg_id then
    call('HSET', job.key, 'status', 'running', 'updated_ts', NOW_S, 'lease', lease)
  else
    job.msg_id = msg_id
    entry = entry_field(job)
    call('HSET', job.key, 'status', 'running', 'updated_ts', NOW_S, 'lease', lease, 'entry', entry)
  end
  local data = '{"attempt":' .. text[job.attempt] .. ',"worker":"' .. WORKER .. '"}'
  emit(job.key, 'running', 'worker.start', data, job.ttl_s, LEASE_UNTIL)
  record(job, 'claim', task, 'queued', 'running', was_lease, WORKER, job.max_attempts, was_fence)
  begin_group(task, lease, job.ttl_s)
  add_lease(job.id, payload, entry)
end

-- The answer with this lease was lost, so no worker ran the job: the attempt is not counted.
local function give_back(job, task)
  local was = job.lease_until
  job.ver, job.attempt, job.lease_until, job.status = job.ver + 1, job.attempt - 1, '0', 'queued'
  record(job, 'release', task, 'running', 'queued', was, WORKER)
end

-- Leases the job of an entry that was just delivered to this worker. The job may be in any state.
local function take(msg_id, flat, ours_unknown)
  local id, task, payload = fields_of(flat)
  local job, unreadable = read_job(id)
  if unreadable then
    return quarantine_job(id, msg_id, unreadable, flat)
  elseif not job then
    return expire(id, task, msg_id)
  end
  if FINAL[job.status] then -- S-18: a redelivered finished job is only acknowledged
    return drop_entry(msg_id)
  end
  if job.status == 'running' and ours_unknown and job.worker == WORKER then
    give_back(job, task)
  elseif job.status == 'running' then
    if tonumber(job.lease_until) > NOW then
      if job.msg_id ~= msg_id then -- the same job enqueued twice
        return drop_entry(msg_id)
      end
      -- The group was deleted and made again: give the entry back to the holder of the lease.
      return pcall('XCLAIM', STREAM, GROUP, job.worker, '0', msg_id, 'JUSTID')
    end
    if job.lease_until == '0' and silent_ms(job, NOW) < FOREIGN_MS then
      return -- a foreign worker runs it; the entry is checked again when it has been idle
    end
    if not reap(job, task, LOST_MAX) then
      return drop_entry(msg_id)
    end
  elseif job.msg_id ~= '-' and job.msg_id ~= msg_id and has_entry(job.msg_id) then -- superseded
    return drop_entry(msg_id)
  end
  start(job, msg_id, task, payload)
end

-- Takes a pending entry over from any consumer. If the entry was deleted, it is only acknowledged.
local function take_over(msg_id, ours_unknown)
  local claimed = call('XCLAIM', STREAM, GROUP, WORKER, '0', msg_id)
  if claimed[1] and claimed[1][2] then
    take(msg_id, claimed[1][2], ours_unknown)
  else
    call('XACK', STREAM, GROUP, msg_id)
  end
end

-- Takes one idle entry if its lease has expired. A second suspect waits for another worker or a later claim.
local function take_idle(msg_id, consumer, idle_ms)
  local entry = call('XRANGE', STREAM, msg_id, msg_id)[1]
  local job = entry and read_job((fields_of(entry[2])))
  if job and is_held(job, consumer, idle_ms, FOREIGN_MS) then
    return
  end
  local is_suspect = job and tonumber(job.lost) + (job.status == 'running' and 1 or 0) >= SUSPECT_FROM
  if is_suspect and suspect ~= '-' then
    return
  end
  local before = leases_n
  take_over(msg_id, false)
  if is_suspect and leases_n > before then
    suspect = job.id
  end
end

-- Takes entries whose leases have expired.
local function take_expired()
  ensure_group()
  each_idle('claim_from', ARGV[4], function(msg_id, consumer, idle_ms)
    more_idle = leases_n >= LIMIT
    if not more_idle then
      take_idle(msg_id, consumer, idle_ms)
    end
    return not more_idle
  end)
  own('HSET', UPKEEP, 'search_at', more_idle and '0' or text[NOW + SEARCH_EVERY_MS])
end

-- S-28: the answer to an earlier claim was lost. Its leases are handed out again.
local function recover()
  local held = {}
  for i = 10, #ARGV do
    held[ARGV[i]] = true
  end
  ensure_group()
  for _, entry in ipairs(call('XPENDING', STREAM, GROUP, '-', '+', '1000', WORKER)) do
    if leases_n < LIMIT and not held[entry[1]] then
      take_over(entry[1], true)
    end
  end
end

local function still_runs(id)
  local job = read_job(id)
  return job and job.status == 'running' and job.worker == WORKER and tonumber(job.lease_until) > NOW
end

return {
  take = take, take_expired = take_expired, recover = recover, promote = promote, ensure_group = ensure_group,
  still_runs = still_runs,
}
