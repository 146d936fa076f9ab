-- Maintains the queue: promotes jobs that are due, reclaims jobs whose lock is gone, marks running jobs for BullMQ's
-- own two-phase check, drops old records of settles, trims the journal. Any worker may run it at any time.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] how often the lease of a job may run out  ARGV[3] ms between two of BullMQ's checks
-- ARGV[4] journal size in bytes  ARGV[5] journal age_ms
-- ARGV[6] worker id  ARGV[7] how many jobs the worker runs at once (0: not known)
-- ARGV[8] journal age_ms of events that a reader has not captured yet
-- Returns { promoted, reclaimed, buried, expired, trimmed, quarantined, 1 if jobs may be in no list }
-- Clauses B-12 B-27 B-28
-- @include step
-- @include enqueue
-- @include reap
-- @include trim
local STALLED_MAX = tonumber(ARGV[2])
local SETTLES_AGE_MS = 600000
local WORKERS, WORKER_AGE_MS = PREFIX .. 'tenure:workers', 3600000

local function forget_workers()
  local all = call('HGETALL', WORKERS)
  for i = 1, #all, 2 do
    if NOW - (tonumber(match(all[i + 1], '^%d+')) or 0) > WORKER_AGE_MS then
      call('HDEL', WORKERS, all[i])
    end
  end
end

-- Other scripts tolerate a failed write to some keys. This one raises for a key of another type, so that the key is
-- repaired soon.
check_types()
call('XLEN', EVENTS)
call('XLEN', JOURNAL)
call('ZCARD', MARKER)
call('SCARD', STALLED)
if call('EXISTS', ID) == 1 then
  call('INCRBY', ID, '0') -- raises too if it is not a whole number
end
call('LLEN', PAUSED)
call('STRLEN', PREFIX .. 'stalled-check')
call('HLEN', WORKERS)
call('ZCARD', PREFIX .. 'tenure:ended')
call('ZCARD', PREFIX .. 'repeat')
call('XLEN', PREFIX .. 'tenure:quarantine')
call('HLEN', PREFIX .. 'metrics:completed')
call('HLEN', PREFIX .. 'metrics:failed')

if ARGV[7] ~= '0' then
  call('HSET', WORKERS, ARGV[6], NOW_S .. ' ' .. ARGV[7])
end

local promoted = promote()

local reclaimed = reap_lockless(STALLED_MAX)

-- Phase one of BullMQ's check: every running job is marked, and a worker that extends the lock removes the mark.
if call('SET', PREFIX .. 'stalled-check', NOW_S, 'PX', ARGV[3], 'NX') then
  call('DEL', STALLED)
  local running = call('LRANGE', ACTIVE, '0', '-1')
  for _, id in ipairs(running) do
    -- No worker writes a lock without an expiry. With such a lock the job would never be reclaimed.
    if call('PTTL', PREFIX .. id .. ':lock') == -1 then
      call('DEL', PREFIX .. id .. ':lock')
    end
  end
  if #running > 0 then
    each_many('SADD', STALLED, running)
  end
  forget_workers()
end

call('ZREMRANGEBYSCORE', PREFIX .. 'tenure:ended', '-inf', text[NOW - SETTLES_AGE_MS])
flush()
if call('EXISTS', JOURNAL) == 1 then
  trim_journal(ARGV[4], ARGV[5], ARGV[8], call('HGET', META, 'tenure.captured'))
end
return { promoted, reclaimed, 0, 0, 0, quarantined, call('EXISTS', PREFIX .. 'tenure:restore') }
