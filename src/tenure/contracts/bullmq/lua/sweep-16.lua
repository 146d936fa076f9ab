-- Removes many jobs at once: drain removes what waits, clean takes old finished (or waiting) jobs.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] drain or clean  ARGV[3] drain: 1 for delayed jobs too; clean: the state
-- ARGV[4] clean: older than, ms  ARGV[5] clean: at most (0: all)
-- Returns the ids that were removed
-- Clauses B-41 B-42
-- @include queue
-- @include waiting
-- @include finish
local M = family()
prove()

-- The waiting job of a scheduler stays: it is what keeps the schedule alive.
local function is_scheduled(id)
  local rjk = redis.pcall('HGET', PREFIX .. id, 'rjk')
  local at = type(rjk) == 'string' and call('ZSCORE', PREFIX .. 'repeat', rjk)
  return at and id == 'repeat:' .. rjk .. ':' .. text[tonumber(at)]
end

local function empty_list(list)
  local gone, stays = {}, {}
  for _, id in ipairs(call('LRANGE', list, '0', '-1')) do
    local into = is_scheduled(id) and stays or gone
    into[#into + 1] = id
  end
  M.drop_finished(gone, true)
  call('DEL', list)
  each_many('RPUSH', list, stays)
  return gone
end

local function empty_set(set)
  local gone = {}
  for _, id in ipairs(call('ZRANGE', set, '0', '-1')) do
    if not is_scheduled(id) then
      gone[#gone + 1] = id
    end
  end
  M.drop_finished(gone, true)
  each_many('ZREM', set, gone)
  return gone
end

local SETS = { completed = COMPLETED, failed = FAILED, delayed = DELAYED, prioritized = PRIORITIZED }

local function is_old(id, field, before)
  local at = redis.pcall('HGET', PREFIX .. id, field)
  at = type(at) == 'string' and tonumber(at)
  return not at or at <= before
end

-- As in BullMQ the number bounds how many are looked at, from those whose turn is next, not how many go.
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
  local gone = {}
  for _, id in ipairs(candidates(state, before, limit)) do
    local free = state ~= 'active' or call('EXISTS', PREFIX .. id .. ':lock') == 0
    if free and not is_scheduled(id) and (finished or is_old(id, stamp, before)) then
      gone[#gone + 1] = id
    end
  end
  M.drop_finished(gone, true)
  if SETS[state] then
    each_many('ZREM', SETS[state], gone)
  else
    for _, id in ipairs(gone) do
      call('LREM', state == 'active' and ACTIVE or WAIT, '1', id)
    end
  end
  emit('cleaned', 'count', text[#gone])
  return gone
end

local function drain()
  local gone = empty_list(WAIT)
  local others = { empty_list(PAUSED), empty_set(PRIORITIZED), ARGV[3] == '1' and empty_set(DELAYED) or {} }
  for _, more in ipairs(others) do
    for _, id in ipairs(more) do
      gone[#gone + 1] = id
    end
  end
  return gone
end

local gone = ARGV[2] == 'drain' and drain() or clean()
flush()
return gone
