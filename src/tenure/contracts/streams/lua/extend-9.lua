-- Extends leases: resets the idle time of their pending entries and moves the end of the lease. It writes only if a
-- third of the lease is over, so that it can be called every second.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] lease_ms
-- ARGV[3..] per lease: job_id, msg_id, fence, token, task
-- Returns per lease { 'ok', lease_until_ms, cancel_requested, remaining_ms } or { 'lost', reason }
-- Clauses S-22 S-23
-- @include job
local LEASE_MS = tonumber(ARGV[2])
local answers = {}

local function extend(job, msg_id, task)
  local cancel = call('HGET', job.key, 'cancel') == '1' and 1 or 0
  local was = job.lease_until
  local left = tonumber(was) - NOW
  if left * 3 > LEASE_MS * 2 then
    return { 'ok', tonumber(was), cancel, left }
  end
  local until_ms = NOW + LEASE_MS
  job.ver, job.lease_until = job.ver + 1, text[until_ms]
  pcall('XCLAIM', STREAM, GROUP, job.worker, '0', msg_id, 'JUSTID')
  call('HSET', job.key, 'lease', lease_field(job))
  refresh(job.key, job.ttl_s, until_ms)
  record(job, 'extend', task, 'running', 'running', was, job.worker)
  return { 'ok', until_ms, cancel, LEASE_MS }
end

for at = 3, #ARGV, 5 do
  local msg_id = ARGV[at + 1]
  local job, unreadable = read_job(ARGV[at])
  local why = why_lost(job, unreadable, msg_id, tonumber(ARGV[at + 2]), ARGV[at + 3])
  answers[#answers + 1] = why and { 'lost', why } or extend(job, msg_id, ARGV[at + 4])
end
flush()
return answers
