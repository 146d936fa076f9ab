-- Puts jobs back that are in no list or set because one was overwritten. The fields of a job say whether it runs, waits
-- for children, waits for its time, or waits. A job that has ended, or that is in a list or set, is not changed.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2..] ids of hashes, which need not be jobs
-- Returns how many jobs were put back
-- Clauses B-55
-- @include step
-- @include enqueue
check_types()

-- The lists are read once, because LPOS for each id would pass over the whole list every time.
local listed = {}
for _, key in ipairs({ WAIT, ACTIVE, PAUSED }) do
  for _, id in ipairs(call('LRANGE', key, '0', '-1')) do
    listed[id] = true
  end
end

local function is_placed(id)
  return listed[id] or call('ZSCORE', COMPLETED, id) or call('ZSCORE', FAILED, id) or call('ZSCORE', DELAYED, id)
    or call('ZSCORE', PRIORITIZED, id) or call('ZSCORE', CHILDREN, id)
end

local function restore(id)
  local key = PREFIX .. id
  local v = redis.pcall('HMGET', key, 'name', 'timestamp', 'finishedOn', 'tn', 'priority', 'delay')
  if not v[1] or not v[2] or v[3] or is_placed(id) then
    return 0
  end
  local ver, state, _, settled = read_tn(v[4])
  local due = tonumber(match(settled, '%d+$'))
  if due == 0 then
    due = (whole(v[2]) or 0) + (whole(v[6]) or 0)
  end
  if state == 'active' or call('EXISTS', key .. ':lock') == 1 then -- upkeep reclaims it unless it has a lock
    put('LPUSH', ACTIVE, id)
  elseif (ver == 0 or state == 'waiting-children') and size('SCARD', key .. ':dependencies') > 0 then
    put('ZADD', CHILDREN, NOW_S, id)
  elseif (ver == 0 or state == 'delayed') and due > NOW then
    delay(id, due)
  else
    wait_at_end(id, whole(v[5]) or 0)
    emit('waiting', 'jobId', id)
  end
  listed[id] = true
  return 1
end

local restored = 0
for i = 2, #ARGV do
  restored = restored + restore(ARGV[i])
end
flush()
return restored
