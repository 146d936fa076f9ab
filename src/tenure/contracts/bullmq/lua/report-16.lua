-- Writes reports of running jobs. Progress goes into the hash and the queue's events, a log line into the job's log,
-- everything else into the events only. Only the holder of the lock may report.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] worker id
-- ARGV[3..] per report: id, fence, token, event ('' for new data of the job), progress JSON ('' for none), step, data
--   JSON (of the event log: the line), hash of the token, how many lines of the log to keep ('' for all)
-- Returns per report { 'ok' } or { 'lost', reason }
-- Clauses B-18 B-30 B-46 B-56
-- @include step
local WORKER = ARGV[2]
-- @include reject
local answers = {}

local function report(id, fence, token, kind, progress, step, data, token_h, log_max)
  local key = PREFIX .. id
  local lock = redis.pcall('GET', key .. ':lock')
  if lock ~= token .. ':' .. fence or call('TYPE', key).ok ~= 'hash' then
    return reject_by_lock('report', id, fence, token_h, lock)
  end
  if progress ~= '' then
    call('HSET', key, 'progress', progress)
  end
  if kind == '' then
    call('HSET', key, 'data', data)
    return { 'ok' }
  end
  if kind == 'log' then -- BullMQ has no event for a new line of the log
    if type(redis.pcall('RPUSH', key .. ':logs', data)) == 'table' then -- a key of another type is replaced
      call('DEL', key .. ':logs')
      call('RPUSH', key .. ':logs', data)
    end
    if log_max ~= '' then
      call('LTRIM', key .. ':logs', '-' .. log_max, '-1')
    end
    return { 'ok' }
  end
  -- B-30: BullMQ reads `data`, the contract's own readers `progress`; both are JSON.
  local shown = progress ~= '' and progress or data
  if kind == 'progress' then
    emit('progress', 'jobId', id, 'data', shown, 'progress', shown, 'timestamp', NOW_S, 'step', step,
      'info', data)
  else
    emit(kind, 'jobId', id, 'data', data, 'timestamp', NOW_S, 'step', step)
  end
  return { 'ok' }
end

for at = 3, #ARGV, 9 do
  answers[#answers + 1] = report(unpack(ARGV, at, at + 8))
end
flush()
return answers
