-- Takes up to `limit` leases. If ARGV[7] is not 0, it first takes back expired leases and promotes due jobs. After a
-- lost answer it first undoes the claim before, so that its jobs do not wait until their leases expire.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] worker id  ARGV[3] limit  ARGV[4] instance of the claimer
-- ARGV[5] number of this claim, rising within the instance  ARGV[6] random prefix of the tokens
-- ARGV[7] how many due jobs and expired leases to handle first (0: none)  ARGV[8] random number for jitter
-- ARGV[9] completed jobs to keep  ARGV[10] failed jobs to keep
-- ARGV[11] 1 after a lost answer  ARGV[12..] then: ids of the leases that this instance knows it holds
-- Returns { state, now_ms, last wake id, next due_ms, leases, quarantined }. state is 'ok', 'paused' or 'late' (a later
--   claim was executed first). A lease is { id, payload, lock_until_ms, attempt, max_attempts, gid, token, fence,
--   task, created_ms, trace, timeout_ms }. quarantined: 'id\nreason' of each record
-- Clauses O-3 O-6 O-8 O-9 O-10 O-11 O-30 O-31 O-33 O-37
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
local WORKER, LIMIT, SEED = ARGV[2], tonumber(ARGV[3]), ARGV[6]
local UPKEEP_MAX, CHANCE, RECOVER = tonumber(ARGV[7]), tonumber(ARGV[8]), ARGV[11] == '1'
-- @include lease

-- What few claims need: functions cost time in every script that defines them. Defined in every claim, they would raise
-- the CPU time of Redis to 1.2 times (2026-11-18).
local function due_functions()
  -- @include outcome
  -- @include due
  KEEP_COMPLETED, KEEP_FAILED = tonumber(ARGV[9]), tonumber(ARGV[10])
  return { requeue = requeue, reap = reap, promote = promote }
end

-- Jobs of the instance's last claim that it does not know of go back to the front of their lanes. The attempt is not
-- counted.
local function undo(before)
  local requeue = due_functions().requeue
  local held = {}
  for i = 12, #ARGV do
    held[ARGV[i]] = true
  end
  for i = #before.ids, 1, -1 do
    local id = before.ids[i]
    local job = not held[id] and read_job(id)
    if job and job.state == 'active' and string.sub(job.token, 1, #before.seed + 1) == before.seed .. '.' then
      requeue(job, {}, 'release', job.attempt - 1, 0, true)
    end
  end
  flush_groups()
  flush_moves()
end

-- Whether the first member of a table of times is due.
local function is_due(key)
  return #call('ZRANGEBYSCORE', key, '-inf', NOW_S, 'LIMIT', '0', '1') > 0
end

local function last_wake()
  local last = call('XREVRANGE', BASE .. ':wake', '+', '-', 'COUNT', '1')[1]
  return last and last[1] or '0-0'
end

local before = claim_of(call('HGET', CLAIMS, ARGV[4]))
if before and before.number >= tonumber(ARGV[5]) then
  return { 'late', NOW, '0-0', 0, {}, {} }
end
if RECOVER and before then
  undo(before)
end
local paused = call('EXISTS', BASE .. ':paused') == 1
if UPKEEP_MAX > 0 and (is_due(ACTIVE) or is_due(DELAYED)) then
  local due = due_functions()
  due.reap(UPKEEP_MAX, CHANCE, true)
  if due.promote(UPKEEP_MAX) > 0 then
    flush_groups()
  end
  flush_moves()
end
if not paused then
  take(LIMIT)
end
if #leases > 0 or RECOVER then
  if #leases > 0 then
    times.last_reserve_ms = true
    count('started', #leases)
  end
  call('HSET', CLAIMS, ARGV[4], cmsgpack.pack({ number = tonumber(ARGV[5]), at = NOW, seed = SEED,
    ids = granted_ids }))
  if not before or NOW - before.at > 1000 then
    local slots = match(call('HGET', BASE .. ':workers', WORKER) or '', ' %d+$')
    call('HSET', BASE .. ':workers', WORKER, NOW_S .. (slots or ''))
  end
end
flush()
-- Each quarantined record is reported to one worker.
local quarantined = quarantined_n > 0 and call('LPOP', BASE .. ':quarantine:new', '100') or {}
if #leases > 0 then
  return { 'ok', NOW, '', 0, leases, quarantined }
end
local due = call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
return { paused and 'paused' or 'ok', NOW, last_wake(), figure(due[2], 0) or 0, leases, quarantined }
