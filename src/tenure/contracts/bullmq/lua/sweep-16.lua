-- Removes many jobs: drain removes jobs that wait, clean removes old jobs of one state.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] drain or clean  ARGV[3] drain: 1 for delayed jobs too; clean: the state
-- ARGV[4] clean: older than, ms  ARGV[5] clean: how many to look at (0: all)
-- Returns the ids of the removed jobs
-- Clauses B-41 B-42
-- @include step
-- @include enqueue
-- @include finish
check_types()

-- Whether the job is the next one of a scheduler. It must stay, because the schedule ends without it (B-41).
local function is_scheduled(id)
  local rjk = redis.pcall('HGET', PREFIX .. id, 'rjk')
  local at = type(rjk) == 'string' and call('ZSCORE', PREFIX .. 'repeat', rjk)
  return at and id == 'repeat:' .. rjk .. ':' .. text[tonumber(at)]
end

local function empty_list(list)
  local removed, others = {}, {}
  for _, id in ipairs(call('LRANGE', list, '0', '-1')) do
    local ids = is_scheduled(id) and others or removed
    ids[#ids + 1] = id
  end
  relations().drop_jobs(removed, true)
  call('DEL', list)
  each_many('RPUSH', list, others)
  return removed
end

local function empty_set(set)
  local removed = {}
  for _, id in ipairs(call('ZRANGE', set, '0', '-1')) do
    if not is_scheduled(id) then
      removed[#removed + 1] = id
    end
  end
  relations().drop_jobs(removed, true)
  each_many('ZREM', set, removed)
  return removed
end

local SETS = { completed = COMPLETED, failed = FAILED, delayed = DELAYED, prioritized = PRIORITIZED }

local function is_old(id, field, before)
  local at = redis.pcall('HGET', PREFIX .. id, field)
  at = type(at) == 'string' and tonumber(at)
  return not at or at <= before
end

-- As in BullMQ, `limit` bounds how many jobs are looked at, those first whose turn is next, not how many are removed.
local function candidates(state, before, limit)
  local set = SETS[state]
  if state == 'completed' or state == 'failed' then
    return call('ZRANGEBYSCORE', set, '0', text[before], 'LIMIT', '0', limit > 0 and text[limit] or '-1')
  elseif set then
    return call('ZRANGE', set, '0', text[limit > 0 and limit - 1 or -1])
  end
  return call('LRANGE', state == 'active' and ACTIVE or WAIT, limit > 0 and text[-limit] or '0', '-1')
end

local function clean()
  local state, before, limit = ARGV[3], NOW - tonumber(ARGV[4]), tonumber(ARGV[5])
  local finished = state == 'completed' or state == 'failed'
  local stamp = state == 'active' and 'processedOn' or 'timestamp'
  local removed = {}
  for _, id in ipairs(candidates(state, before, limit)) do
    local free = state ~= 'active' or call('EXISTS', PREFIX .. id .. ':lock') == 0
    if free and not is_scheduled(id) and (finished or is_old(id, stamp, before)) then
      removed[#removed + 1] = id
    end
  end
  relations().drop_jobs(removed, true)
  if SETS[state] then
    each_many('ZREM', SETS[state], removed)
  else
    for _, id in ipairs(removed) do
      call('LREM', state == 'active' and ACTIVE or WAIT, '1', id)
    end
  end
  emit('cleaned', 'count', text[#removed])
  return removed
end

local function drain()
  local removed = empty_list(WAIT)
  local others = { empty_list(PAUSED), empty_set(PRIORITIZED), ARGV[3] == '1' and empty_set(DELAYED) or {} }
  for _, more in ipairs(others) do
    for _, id in ipairs(more) do
      removed[#removed + 1] = id
    end
  end
  return removed
end

local removed = ARGV[2] == 'drain' and drain() or clean()
flush()
return removed
