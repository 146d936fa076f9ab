-- Stores jobs and makes each of them claimable in one step. A batch that is sent again under the same
-- request id answers as before and stores nothing.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] request id ('' for none)  ARGV[3] greatest depth (0: none)
-- ARGV[4] how long idempotency keys last, ms
-- ARGV[5..] per job: id ('' for the next number), name, data JSON, opts JSON, timestamp ('' for now),
--   delay_ms, priority, 1 for lifo, parent key, parent JSON, deduplication id, its ttl_ms, its mode (any
--   of e extend, r replace, k keep the last, s reschedule), 1 for a parent that waits for its children, idempotency
--   key, request hash, attempts, hash of the data
-- Returns per job { 'created' | 'replayed' | 'conflict' | 'deduplicated' | 'full' | 'orphan', id }
-- Clauses B-1 B-2 B-3 B-4 B-5 B-6 B-7 B-32 B-33
-- @include queue
-- @include waiting
-- @include finish
local M = family()
local REQUEST = ARGV[2] ~= '' and PREFIX .. 'tenure:add:' .. ARGV[2] or nil
local DEPTH_MAX, IDEM_MS = tonumber(ARGV[3]), ARGV[4]
local WIDTH, FIRST = 18, 5
local REQUEST_MS = '600000'

if REQUEST then -- B-33: the answer to the same request, if it was executed before
  local before = call('GET', REQUEST)
  if before then
    return cjson.decode(before)
  end
end
if not settings[5] then
  call('HSET', META, 'opts.maxLenEvents', EVENTS_MAX)
end

local total = (#ARGV - FIRST + 1) / WIDTH
local number = total > 0 and call('INCRBY', ID, text[total]) - total or 0
local depth = DEPTH_MAX > 0 and call('LLEN', WAIT) + call('ZCARD', PRIORITIZED) + call('ZCARD', DELAYED)
  + call('LLEN', ACTIVE) + call('ZCARD', CHILDREN) or 0
local answers = {}

local function deduplicated(existing, deid, id)
  emit('deduplicated', 'jobId', existing, 'deduplicationId', deid, 'deduplicatedJobId', id)
  return { 'deduplicated', existing }
end

local function hold(de, id, ttl)
  if ttl > 0 then
    call('SET', de, id, 'PX', text[ttl])
  else
    call('SET', de, id)
  end
end

-- The job that is turned away takes the place of the one turned away before, and runs when the active
-- one has ended.
local function keep_last(at, id, deid, de)
  local dn = PREFIX .. 'dn:' .. deid
  call('DEL', dn)
  call('HSET', dn, 'name', ARGV[at + 1], 'data', ARGV[at + 2], 'opts', ARGV[at + 3], 'jid', id)
  if ARGV[at + 8] ~= '' then
    call('HSET', dn, 'pk', ARGV[at + 8], 'pd', ARGV[at + 9], 'pdk', ARGV[at + 8] .. ':dependencies')
  end
  call('PERSIST', de)
end

-- The job that is there gets the delay of the one that is turned away, while it is still delayed.
local function reschedule(existing, from_ms, wait_ms)
  local key = PREFIX .. existing
  if type(redis.pcall('ZSCORE', DELAYED, existing)) ~= 'string' or call('TYPE', key).ok ~= 'hash' then
    return
  end
  local due = from_ms + tonumber(wait_ms)
  call('HSET', key, 'delay', wait_ms)
  delay(existing, due)
  local v = call('HMGET', key, 'tn', 'name', 'ats', 'priority')
  local ver, state, _, old_fence, kind, old_due = read_tn(v[1])
  if ver > 0 then
    call('HSET', key, 'tn', text[ver + 1] .. ' delayed 0 ' .. old_fence .. ' ' .. kind .. ' ' .. old_due)
    note({ id = existing, kind = 'promote', ver = text[ver + 1], task = v[2], from = state, to = 'delayed',
      fence = v[3], due = text[due], priority = v[4] })
  end
end

-- B-7: nil when the job may be stored, else the answer that names the job it duplicates.
local function dedup(at, id)
  local deid, ttl, mode = ARGV[at + 10], tonumber(ARGV[at + 11]) or 0, ARGV[at + 12]
  if find(mode, 'k') then
    ttl = 0 -- the id is held until its job has ended, so that the one kept can follow
  end
  local de = PREFIX .. 'de:' .. deid
  local existing = redis.pcall('GET', de)
  if type(existing) == 'table' then -- a key of another type holds no id
    call('DEL', de)
    existing = nil
  end
  if existing and find(mode, 'k') and call('EXISTS', PREFIX .. existing) == 0 then
    existing = nil -- its job was removed: nobody will free the id
  end
  if not existing then
    return hold(de, id, ttl)
  end
  if find(mode, 'r') and redis.pcall('ZREM', DELAYED, existing) == 1 then
    local v = redis.pcall('HMGET', PREFIX .. existing, 'parentKey', 'parent', 'tn', 'name', 'ats')
    if v[1] then
      M.child_removed(PREFIX .. existing, v[1], v[2])
    end
    local ver, state = read_tn(v[3])
    if ver > 0 then
      note({ id = existing, kind = 'remove', ver = text[ver + 1], task = v[4], from = state, fence = v[5] })
    end
    M.delete_job(PREFIX .. existing)
    emit('removed', 'jobId', existing, 'prev', 'delayed')
    deduplicated(id, deid, existing)
    call('DEL', PREFIX .. 'dn:' .. deid)
    if ttl > 0 and not find(mode, 'e') then
      call('SET', de, id, 'KEEPTTL')
    else
      hold(de, id, ttl)
    end
    return nil
  end
  if find(mode, 'k') and type(redis.pcall('LPOS', ACTIVE, existing)) == 'number' then
    keep_last(at, id, deid, de)
  elseif find(mode, 'r') then
    return { 'deduplicated', existing } -- BullMQ emits no event for a job that came too late to replace
  elseif find(mode, 'e') and ttl > 0 then
    call('SET', de, existing, 'PX', text[ttl])
  end
  local answer = deduplicated(existing, deid, id)
  if find(mode, 's') then
    reschedule(existing, tonumber(ARGV[at + 4]) or NOW, ARGV[at + 5])
  end
  return answer
end

local function known(id, at)
  local v = redis.pcall('HMGET', PREFIX .. id, 'name', 'data')
  if v.err then -- the job's key is of another type
    return { 'conflict', id }
  elseif not v[1] then
    return nil
  end
  emit('duplicated', 'jobId', id)
  local same = v[1] == ARGV[at + 1] and v[2] == ARGV[at + 2]
  return { same and 'replayed' or 'conflict', id }
end

local function add(at)
  number = number + 1
  local custom, idem = ARGV[at], ARGV[at + 14]
  local idem_key = PREFIX .. 'tenure:idem:' .. idem
  if idem ~= '' then
    local kept = redis.pcall('GET', idem_key)
    local kept_id, kept_h = match(type(kept) == 'string' and kept or '', '^(.-) (%S+)$')
    if kept_id then
      return { kept_h == ARGV[at + 15] and 'replayed' or 'conflict', kept_id }
    end
  end
  local id = custom ~= '' and custom or text[number]
  local before = custom ~= '' and known(id, at)
  if before then
    return before
  end
  if DEPTH_MAX > 0 and depth >= DEPTH_MAX then
    return { 'full', id }
  end
  local parent_key = ARGV[at + 8] ~= '' and ARGV[at + 8] or nil
  if parent_key and call('EXISTS', parent_key) == 0 then
    return { 'orphan', id }
  end
  local deid = ARGV[at + 10] ~= '' and ARGV[at + 10] or nil
  local turned_away = deid and dedup(at, id)
  if turned_away then
    return turned_away
  end
  M.store_job({
    id = id, name = ARGV[at + 1], data = ARGV[at + 2], opts = ARGV[at + 3],
    timestamp = ARGV[at + 4] ~= '' and ARGV[at + 4] or nil, delay = tonumber(ARGV[at + 5]),
    priority = tonumber(ARGV[at + 6]), lifo = ARGV[at + 7] == '1', parent_key = parent_key,
    parent = ARGV[at + 9], deid = deid, waits_children = ARGV[at + 13] == '1',
    max_attempts = ARGV[at + 16], payload_h = ARGV[at + 17],
  })
  depth = depth + 1
  if idem ~= '' then
    call('SET', idem_key, id .. ' ' .. ARGV[at + 15], 'PX', IDEM_MS)
  end
  return { 'created', id }
end

for at = FIRST, #ARGV, WIDTH do
  answers[#answers + 1] = add(at)
end
flush()
if REQUEST then
  call('SET', REQUEST, cjson.encode(answers), 'PX', REQUEST_MS)
end
return answers
