-- Removes a paused queue in steps: its jobs in every state with their keys, its schedulers, and at last its settings,
-- events and counters. The journal stays, and so does the position up to which it was captured.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] how many jobs and schedulers at most  ARGV[3] 1 to remove jobs that run as well
-- Returns 0 if nothing is left, 1 if there is more, -1 if the queue is not paused, -2 if jobs run
-- Clauses B-57
-- @include step
-- @include enqueue
-- @include finish
-- @include job
local left = tonumber(ARGV[2])
if not IS_PAUSED then
  return -1
end
if ARGV[3] ~= '1' and call('LLEN', ACTIVE) > 0 then
  return -2
end

local function take_list(key)
  local ids = call('LRANGE', key, '0', text[left - 1])
  call('LTRIM', key, text[#ids], '-1')
  return ids
end

local function take_set(key)
  local ids = call('ZRANGE', key, '0', text[left - 1])
  each_many('ZREM', key, ids)
  return ids
end

-- Jobs that run are cancelled first, so that the journal says how their leases ended.
for _, id in ipairs(call('LRANGE', ACTIVE, '0', text[left - 1])) do
  local job = read_job(id)
  call('LREM', ACTIVE, '1', id)
  call('DEL', PREFIX .. id .. ':lock')
  if job then
    job.parent_key, job.deid = nil, nil -- drop_jobs below handles parent and deduplication
    finish(job, { to = 'failed', kind = 'cancel', value = 'obliterated', code = 'cancelled', attempts = '1000000',
      worker = '', prev = 'active' })
  end
end
flush_finished()

local places = { { WAIT, take_list }, { DELAYED, take_set }, { COMPLETED, take_set }, { PRIORITIZED, take_set },
  { FAILED, take_set }, { CHILDREN, take_set } }
for _, place in ipairs(places) do
  if left > 0 then
    local ids = place[2](place[1])
    relations().drop_jobs(ids, true)
    left = left - #ids
  end
end
if left > 0 then
  local schedulers = take_set(PREFIX .. 'repeat')
  for _, id in ipairs(schedulers) do
    call('DEL', PREFIX .. 'repeat:' .. id)
  end
  left = left - #schedulers
end
flush()
if left <= 0 then
  return 1
end
local captured = call('HGET', META, 'tenure.captured')
call('DEL', EVENTS, MARKER, STALLED, LIMITER, PC, ID, META, PREFIX .. 'stalled-check', PREFIX .. 'delay',
  PREFIX .. 'metrics:completed', PREFIX .. 'metrics:completed:data', PREFIX .. 'metrics:failed',
  PREFIX .. 'metrics:failed:data', PREFIX .. 'tenure:ended', PREFIX .. 'tenure:workers',
  PREFIX .. 'tenure:restore')
if captured then
  call('HSET', META, 'tenure.captured', captured)
end
return 0
