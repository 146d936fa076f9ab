-- What an operator does to single jobs: send back, cancel, remove, promote, change the priority.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] leasehold:journal
-- ARGV[1] prefix  ARGV[2] retry, again (as retry, attempts kept), cancel, remove or promote  ARGV[3..] ids
-- Returns per id 'ok', 'requested' (its worker is told), 'missing', or the state that forbids it
-- Clauses B-35 B-36 B-37 B-38
-- @include queue
-- @include waiting
-- @include finish
local M = more()
local VERB = ARGV[2]

local function state_of(id)
  if call('ZSCORE', COMPLETED, id) then return 'completed' end
  if call('ZSCORE', FAILED, id) then return 'failed' end
  if call('ZSCORE', DELAYED, id) then return 'delayed' end
  if call('ZSCORE', PRIORITIZED, id) then return 'prioritized' end
  if call('ZSCORE', CHILDREN, id) then return 'waiting-children' end
  if call('LPOS', ACTIVE, id) then return 'active' end
  if call('LPOS', WAIT, id) then return 'waiting' end
  if call('LPOS', PAUSED, id) then return 'paused' end
  return 'unknown'
end

local function read(id)
  local key = PREFIX .. id
  local v = call('HMGET', key, 'name', 'atm', 'stc', 'ats', 'lh', 'priority', 'parentKey', 'parent',
    'deid', 'opts', 'rjk')
  if not v[1] then
    return nil
  end
  local ver, journalled, lease = read_lh(v[5])
  return { id = id, key = key, name = plain(v[1]), atm = tonumber(v[2]) or 0, stc = tonumber(v[3]) or 0,
    fence = v[4] or '0', ver = ver, journalled = journalled, lease = lease, priority = v[6] or '0',
    parent_key = v[7], parent = v[8], deid = v[9], opts = v[10], rjk = v[11], state = state_of(id) }
end

local OUT = {
  waiting = function(id) call('LREM', WAIT, '1', id) end,
  paused = function(id) call('LREM', PAUSED, '1', id) end,
  prioritized = function(id) call('ZREM', PRIORITIZED, id) end,
  delayed = function(id) call('ZREM', DELAYED, id) end,
  completed = function(id) call('ZREM', COMPLETED, id) end,
  failed = function(id) call('ZREM', FAILED, id) end,
  ['waiting-children'] = function(id) call('ZREM', CHILDREN, id) end,
  unknown = function() end,
}
-- What BullMQ's own events call the place a job was removed from.
local PLACE = { waiting = 'wait', unknown = 'unknown' }

local function write_lh(job, to)
  call('HSET', job.key, 'lh', text[job.ver + 1] .. ' ' .. to .. ' 0 0 - 0')
end

local function retry(job)
  if job.state ~= 'completed' and job.state ~= 'failed' then
    return job.state
  end
  OUT[job.state](job.id)
  call('HDEL', job.key, 'finishedOn', 'processedOn', 'failedReason', 'returnvalue', 'cancel')
  local attempt = text[job.atm + job.stc]
  if VERB == 'retry' then
    call('HDEL', job.key, 'atm', 'stc')
    attempt = '0'
  end
  local to = wait_at_end(job.id, tonumber(job.priority) or 0)
  if job.parent_key and call('EXISTS', job.parent_key) == 1 then
    if call('ZREM', job.parent_key .. ':unsuccessful', job.key) == 1
      or call('HDEL', job.parent_key .. ':failed', job.key) == 1
      or call('HDEL', job.parent_key .. ':processed', job.key) == 1 then
      call('SADD', job.parent_key .. ':dependencies', job.key)
    end
  end
  emit('waiting', 'jobId', job.id, 'prev', job.state)
  write_lh(job, to)
  note(job.id, 'reopen', text[job.ver + 1], NOW_S, job.name, job.state, to, attempt, job.fence,
    job.fence, '0', '0', '', '0', '0', '', '', '', '', job.priority)
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
  OUT[job.state](job.id)
  local prev = job.state
  local count, age = M.keep_of(job.opts, 'removeOnFail')
  job.state = job.journalled == 'delayed' and 'delayed' or job.state
  job.lease = '0'
  finish(job, { to = 'failed', kind = 'cancel', value = 'cancelled', code = 'cancelled',
    keep_count = count, keep_age = age, attempts = '1000000', worker = '', prev = prev })
  return 'ok'
end

local function remove_tree(job)
  if call('EXISTS', job.key .. ':lock') == 1 or job.state == 'active' then
    return 'active'
  end
  for _, child_key in ipairs(call('SMEMBERS', job.key .. ':dependencies')) do
    -- Children in this queue that have not run go with their parent; those elsewhere lose it.
    local child = child_key:sub(1, #PREFIX) == PREFIX and read(child_key:sub(#PREFIX + 1))
    if child then
      remove_tree(child)
    else
      call('HDEL', child_key, 'parentKey', 'parent')
    end
  end
  OUT[job.state](job.id)
  if job.parent_key then
    M.child_removed(job.key, job.parent_key, job.parent)
  end
  if job.deid then
    M.forget_dedup(job.id, job.deid)
  end
  M.delete_job(job.key)
  emit('removed', 'jobId', job.id, 'prev', PLACE[job.state] or job.state)
  local from = job.journalled == 'delayed' and 'delayed' or job.state
  note(job.id, 'remove', text[job.ver + 1], NOW_S, job.name, from, '', '0', job.fence, job.fence, '0',
    '0', '')
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
  return 'ok', to
end

local DO = { retry = retry, again = retry, cancel = cancel, remove = remove_tree, promote = promote_one }
local answers = {}
for i = 3, #ARGV do
  local job = read(ARGV[i])
  answers[#answers + 1] = job and (DO[VERB](job)) or 'missing'
end
flush()
return answers
