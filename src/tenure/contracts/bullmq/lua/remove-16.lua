-- Removes jobs that do not run, each with all its descendants, which may be in other queues. If any job of the tree is
-- locked, none is removed.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] 1 to remove the children too  ARGV[3..] ids
-- Returns per id 'ok', 'missing' or 'active'
-- Clauses B-37
-- @include step
-- @include enqueue
-- @include finish
check_types()
local WITH_CHILDREN = ARGV[2] == '1'

-- "bull:mail:17" is job 17 of the queue "bull:mail:".
local function split(key)
  return match(key, '^(.*:)([^:]+)$')
end

-- The keys of all children, as their parent keeps them: first those that have completed. A job that names another
-- parent, or none, is not a child: else a writer of one queue could remove jobs of all others.
local function children_of(key)
  local found = {}
  local lists = { redis.pcall('HKEYS', key .. ':processed'), redis.pcall('HKEYS', key .. ':failed'),
    redis.pcall('ZRANGE', key .. ':unsuccessful', '0', '-1'), redis.pcall('SMEMBERS', key .. ':dependencies') }
  for _, keys in ipairs(lists) do -- a key of another type names no children
    for _, child in ipairs(keys) do
      if redis.pcall('HGET', child, 'parentKey') == key then
        found[#found + 1] = child
      end
    end
  end
  return found
end

-- Another program may have written a job that is its own descendant, so each job is visited once.
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

-- Removes the job from its list or set; returns the name of that key, as BullMQ's events have it.
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
    relations().forget_dedup(id, v[1], prefix)
  end
  local prev = take_out(prefix, id)
  relations().delete_job(key)
  redis.pcall('XADD', prefix .. 'events', '*', 'event', 'removed', 'jobId', id, 'prev', prev)
  local ver, state = read_tn(v[2])
  if ver > 0 then
    note_in(prefix, { id = id, kind = 'remove', ver = text[ver + 1], task = v[3], from = state,
      fence = whole(v[4]) and v[4] })
  end
end

-- In this order: the parent stops waiting for the job, the children are removed, the job is removed.
local seen = {}
local function remove(prefix, id)
  local key = prefix .. id
  if seen[key] then
    return 'missing'
  end
  seen[key] = true
  local v = redis.pcall('HMGET', key, 'name', 'parentKey', 'parent')
  if not v[1] then
    return 'missing'
  end
  if v[2] then
    relations().child_removed(key, v[2], v[3])
  end
  for _, child in ipairs(WITH_CHILDREN and children_of(key) or {}) do
    local child_prefix, child_id = split(child)
    if child_id then -- anything else is not the key of a job
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
