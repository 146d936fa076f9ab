-- Removes jobs that nobody runs, each with its children and theirs, in whatever queue they are. A tree of
-- which any job is locked stays whole.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] 1 to remove the children too  ARGV[3..] ids
-- Returns per id 'ok', 'missing' or 'active'
-- Clauses B-37
-- @include queue
-- @include waiting
-- @include finish
local M = family()
prove()
local WITH_CHILDREN = ARGV[2] == '1'

-- "bull:mail:17" is job 17 of the queue "bull:mail:".
local function split(key)
  return match(key, '^(.*:)([^:]+)$')
end

-- Children by what became of them, as their parent keeps them: first those that have ended.
local function children_of(key)
  local found = redis.pcall('HKEYS', key .. ':processed') -- a key of another type names no children
  local others = { redis.pcall('HKEYS', key .. ':failed'), redis.pcall('ZRANGE', key .. ':unsuccessful', '0', '-1'),
    redis.pcall('SMEMBERS', key .. ':dependencies') }
  for _, keys in ipairs(others) do
    for _, child in ipairs(keys) do
      found[#found + 1] = child
    end
  end
  return found
end

-- What another program wrote may name a job as its own child: each is looked at once.
local function is_locked(key, seen)
  if seen[key] then
    return false
  end
  seen[key] = true
  if call('EXISTS', key .. ':lock') == 1 then
    return true
  end
  for _, child in ipairs(WITH_CHILDREN and children_of(key) or {}) do
    if is_locked(child, seen) then
      return true
    end
  end
  return false
end

-- Takes the job from its place and says which that was, in the words of BullMQ's events.
local function take_out(prefix, id)
  for _, place in ipairs({ 'completed', 'waiting-children', 'delayed', 'failed', 'prioritized' }) do
    if redis.pcall('ZREM', prefix .. place, id) == 1 then
      return place
    end
  end
  for _, place in ipairs({ 'wait', 'paused', 'active' }) do
    local taken = redis.pcall('LREM', prefix .. place, '0', id)
    if type(taken) == 'number' and taken > 0 then
      return place
    end
  end
  return 'unknown'
end

local function forget(prefix, id, key)
  local v = redis.pcall('HMGET', key, 'deid', 'tn', 'name', 'ats')
  if v[1] then
    M.forget_dedup(id, v[1], prefix)
  end
  local prev = take_out(prefix, id)
  M.delete_job(key)
  redis.pcall('XADD', prefix .. 'events', '*', 'event', 'removed', 'jobId', id, 'prev', prev)
  local ver, state = read_tn(v[2])
  if ver > 0 then
    redis.pcall('XADD', prefix .. 'tenure:journal', '*', 'e', journal_line({ id = id, kind = 'remove',
      ver = text[ver + 1], task = v[3], from = state, fence = whole(v[4]) and v[4] }))
  end
end

-- The parent learns of it first, then the children go, then the job itself.
local gone = {}
local function remove(prefix, id)
  local key = prefix .. id
  if gone[key] then
    return 'missing'
  end
  gone[key] = true
  local v = redis.pcall('HMGET', key, 'name', 'parentKey', 'parent')
  if not v[1] then
    return 'missing'
  end
  if v[2] then
    M.child_removed(key, v[2], v[3])
  end
  for _, child in ipairs(WITH_CHILDREN and children_of(key) or {}) do
    local child_prefix, child_id = split(child)
    if child_id then -- any other word names no job
      remove(child_prefix, child_id)
    end
  end
  forget(prefix, id, key)
  return 'ok'
end

local answers = {}
for i = 3, #ARGV do
  local id = ARGV[i]
  if is_locked(PREFIX .. id, {}) or call('LPOS', ACTIVE, id) then
    answers[#answers + 1] = call('EXISTS', PREFIX .. id) == 1 and 'active' or 'missing'
  else
    answers[#answers + 1] = remove(PREFIX, id)
  end
end
flush()
return answers
