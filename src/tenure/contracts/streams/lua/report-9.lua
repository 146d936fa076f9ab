-- Appends reports of running attempts to the event streams of their jobs. Only the holder of the lease may report.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace
-- ARGV[2..] per report: job_id, msg_id, fence, token, task, type, step, data, progress ('' for none)
-- Returns per report { 'ok' } or { 'lost', reason }, and as a further element quarantined records, if any:
--   { job_id, reason, ... }
-- Clauses S-5 S-7 S-22
-- @include job
local answers = {}

local function publish(job, task, kind, step, data, progress)
  job.ver = job.ver + 1
  if progress == '' then
    call('HSET', job.key, 'updated_ts', NOW_S, 'lease', lease_field(job))
  else
    call('HSET', job.key, 'updated_ts', NOW_S, 'lease', lease_field(job), 'progress', progress)
  end
  emit(job.key, kind, step, data, job.ttl_s, tonumber(job.lease_until))
  record(job, 'report', task, 'running', 'running', job.lease_until, job.worker,
    more(job.max_attempts, '', '', '', '0', kind))
  return { 'ok' }
end

for at = 2, #ARGV, 9 do
  local id, fence, token, task = ARGV[at], tonumber(ARGV[at + 2]), ARGV[at + 3], ARGV[at + 4]
  local job, unreadable = read_job(id)
  local why = why_lost(job, unreadable, ARGV[at + 1], fence, token)
  if why then
    reject(id, task, job, fence, token, why)
    answers[#answers + 1] = { 'lost', why }
  else
    answers[#answers + 1] = publish(job, task, ARGV[at + 5], ARGV[at + 6], ARGV[at + 7], ARGV[at + 8])
  end
end
flush()
answers[#answers + 1] = #quarantined > 0 and quarantined or nil
return answers
