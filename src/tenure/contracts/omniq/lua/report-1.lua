-- Appends reports of running attempts to the event streams of their jobs, and stores their progress.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] worker id
-- ARGV[3..] per report: id, token, fence, type, step, data (JSON), progress (JSON, '' for none)
-- Returns per report 1 or { 'lost', OmniQ's reason }
-- Clauses O-32 O-40
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
local answers = {}
for at = 3, #ARGV, 7 do
  local id, token, fence, progress = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 6]
  local job = read_job(id)
  local why = refusal(job, token, fence, call('ZSCORE', ACTIVE, id))
  if why then
    reject(id, job, fence, ARGV[2], 'report')
    answers[#answers + 1] = { 'lost', why }
  else
    local key = BASE .. ':events:' .. id
    call('XADD', key, 'MAXLEN', '~', '1000', '*', 'type', ARGV[at + 3], 'ts', NOW_S, 'step', ARGV[at + 4], 'data',
      ARGV[at + 5])
    call('PEXPIRE', key, '604800000')
    if progress ~= '' then
      call('HSET', job.key, 'progress', progress)
    end
    answers[#answers + 1] = 1
  end
end
flush()
return answers
