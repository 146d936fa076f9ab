-- Operations on single jobs: retry, cancel, promote, change of the due time, the priority or the data.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] retry, again (as Node's retry: attempts stay), cancel, promote, delay, priority or data
-- ARGV[3] the delay from now in ms, the priority, or the data JSON  ARGV[4] 1 to go before equals  ARGV[5..] ids
-- Returns per id 'ok', 'requested' (its worker learns of it), 'missing', or the state that forbids it
-- Clauses B-35 B-36 B-38 B-49 B-50 B-56
-- @include step
-- @include enqueue
-- @include finish
-- @include job
check_types()
local VALUE, TO_FRONT = tonumber(ARGV[3]), ARGV[4] == '1'

local function write_tn(job, to)
  call('HSET', job.key, 'tn', text[job.ver + 1] .. ' ' .. to .. ' 0 0 - 0')
end

local function retry(job)
  if job.state ~= 'completed' and job.state ~= 'failed' then
    return job.state
  end
  LEAVE[job.state](job.id)
  call('HDEL', job.key, 'finishedOn', 'processedOn', 'failedReason', 'returnvalue', 'cancel')
  local attempt = text[job.atm + job.stc]
  if ARGV[2] == 'retry' then
    call('HDEL', job.key, 'atm', 'stc')
    attempt = '0'
  end
  local to = wait_at_end(job.id, tonumber(job.priority) or 0)
  rejoin_parent(job)
  emit('waiting', 'jobId', job.id, 'prev', job.state)
  write_tn(job, to)
  note({ id = job.id, kind = 'reopen', ver = text[job.ver + 1], task = job.name, from = job.state, to = to,
    attempt = attempt, fence = job.fence, priority = job.priority })
  return 'ok'
end

local function cancel(job)
  if job.state == 'completed' or job.state == 'failed' then
    return job.state
  end
  if job.state == 'active' then
    call('HSET', job.key, 'cancel', '1')
    return 'requested'
  end
  LEAVE[job.state](job.id)
  local prev = job.state
  local count, age, limit = relations().keep_of(job.opts, 'removeOnFail')
  job.state = job.journalled == 'delayed' and 'delayed' or job.state
  job.lease = '0'
  finish(job, { to = 'failed', kind = 'cancel', value = 'cancelled', code = 'cancelled',
    keep_count = count, keep_age = age, keep_limit = limit, attempts = '1000000', worker = '', prev = prev })
  return 'ok'
end

local function promote_one(job)
  if job.state ~= 'delayed' then
    return job.state
  end
  call('ZREM', DELAYED, job.id)
  local to = wait_at_end(job.id, tonumber(job.priority) or 0)
  emit('waiting', 'jobId', job.id, 'prev', 'delayed')
  call('HSET', job.key, 'delay', '0')
  note_move(job, 'promote', to)
  return 'ok'
end

local function change_delay(job)
  if job.state ~= 'delayed' then
    return job.state
  end
  local due = NOW + VALUE
  call('HSET', job.key, 'delay', ARGV[3])
  delay(job.id, due)
  note_move(job, 'promote', 'delayed', text[due])
  return 'ok'
end

-- The field `priority` changes, the options do not. A job that waits moves at once, every other one when it next waits.
local function change_priority(job)
  if job.state == 'completed' or job.state == 'failed' then
    return job.state
  end
  call('HSET', job.key, 'priority', ARGV[3])
  if job.state == 'waiting' or job.state == 'prioritized' then
    LEAVE[job.state](job.id)
    job.priority = ARGV[3]
    note_move(job, 'promote', (TO_FRONT and wait_at_front or wait_at_end)(job.id, VALUE))
  end
  return 'ok'
end

local function change_data(job)
  call('HSET', job.key, 'data', ARGV[3])
  return 'ok'
end

local STEPS = { retry = retry, again = retry, cancel = cancel, promote = promote_one, delay = change_delay,
  priority = change_priority, data = change_data }
local step = STEPS[ARGV[2]]
local answers = {}
for i = 5, #ARGV do
  local job = read_job(ARGV[i])
  answers[#answers + 1] = job and step(job) or 'missing'
end
flush()
return answers
