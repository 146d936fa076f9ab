-- Stores jobs and makes each of them claimable in one step. A batch that is sent again under the same request id gets
-- the same answer as before and stores nothing.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] request id ('' for none)  ARGV[3] greatest depth (0: none)
-- ARGV[4] how long idempotency keys last, ms
-- ARGV[5..] per job: id ('' for the next number), name, data JSON, opts JSON, timestamp ('' for now), delay_ms,
--   priority, attempts, hash of the data, idempotency key, request hash, and what few jobs have as JSON ('' for none):
--   lifo, waits_children, parent_key, parent (JSON), deid (deduplication id), dedup_ttl (ms), dedup_mode (any of
--   e extend, r replace, k keep the last, s reschedule)
-- Returns per job { 'created' | 'replayed' | 'conflict' | 'deduplicated' | 'full' | 'orphan', id }
-- Clauses B-1 B-2 B-3 B-4 B-5 B-6 B-7 B-32 B-33
-- @include step
-- @include enqueue
-- @include finish
local store_job = relations().store_job
local REQUEST = ARGV[2] ~= '' and PREFIX .. 'tenure:add:' .. ARGV[2] or nil
local DEPTH_MAX, IDEM_MS = tonumber(ARGV[3]), ARGV[4]
local WIDTH, FIRST = 12, 5
local REQUEST_MS = '600000'

if REQUEST then -- B-33
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

-- Keeps the job that is turned away, instead of one that was turned away before. It runs when the active job has ended.
local function keep_last(job, de)
  local dn = PREFIX .. 'dn:' .. job.deid
  call('DEL', dn)
  call('HSET', dn, 'name', job.name, 'data', job.data, 'opts', job.opts, 'jid', job.id)
  if job.parent_key then
    call('HSET', dn, 'pk', job.parent_key, 'pd', job.parent, 'pdk', job.parent_key .. ':dependencies')
  end
  call('PERSIST', de)
end

-- Gives the existing job, while it is delayed, the delay of the job that is turned away.
local function reschedule(existing, from_ms, wait_ms)
  local key = PREFIX .. existing
  if type(redis.pcall('ZSCORE', DELAYED, existing)) ~= 'string' or call('TYPE', key).ok ~= 'hash' then
    return
  end
  local due = from_ms + wait_ms
  call('HSET', key, 'delay', text[wait_ms])
  delay(existing, due)
  local v = call('HMGET', key, 'tn', 'name', 'ats', 'priority')
  local ver, state, _, settled = read_tn(v[1])
  if ver > 0 then
    call('HSET', key, 'tn', text[ver + 1] .. ' delayed 0 ' .. settled)
    note({ id = existing, kind = 'promote', ver = text[ver + 1], task = v[2], from = state, to = 'delayed',
      fence = v[3], due = text[due], priority = v[4] })
  end
end

-- Removes the delayed job that holds the deduplication id; the new job takes its place.
local function replace(existing, job, de, ttl)
  local key = PREFIX .. existing
  local v = redis.pcall('HMGET', key, 'parentKey', 'parent', 'tn', 'name', 'ats')
  if v[1] then
    relations().child_removed(key, v[1], v[2])
  end
  local ver, state = read_tn(v[3])
  if ver > 0 then
    note({ id = existing, kind = 'remove', ver = text[ver + 1], task = v[4], from = state, fence = v[5] })
  end
  relations().delete_job(key)
  emit('removed', 'jobId', existing, 'prev', 'delayed')
  deduplicated(job.id, job.deid, existing)
  call('DEL', PREFIX .. 'dn:' .. job.deid)
  if ttl > 0 and not find(job.dedup_mode, 'e') then
    call('SET', de, job.id, 'KEEPTTL')
  else
    hold(de, job.id, ttl)
  end
end

-- B-7: nil if the job may be stored, else the answer that names the job it duplicates.
local function dedup(job)
  local deid, ttl, mode = job.deid, job.dedup_ttl, job.dedup_mode
  if find(mode, 'k') then
    ttl = 0 -- the id is held until its job has ended, so that the job that is kept can follow
  end
  local de = PREFIX .. 'de:' .. deid
  local existing = redis.pcall('GET', de)
  if type(existing) == 'table' then -- a key of another type holds no id
    call('DEL', de)
    existing = nil
  end
  if existing and find(mode, 'k') and call('EXISTS', PREFIX .. existing) == 0 then
    existing = nil -- its job was removed, so no end of a job will free the id
  end
  if not existing then
    return hold(de, job.id, ttl)
  end
  if find(mode, 'r') and redis.pcall('ZREM', DELAYED, existing) == 1 then
    return replace(existing, job, de, ttl)
  end
  if find(mode, 'k') and type(redis.pcall('LPOS', ACTIVE, existing)) == 'number' then
    keep_last(job, de)
  elseif find(mode, 'r') then
    return { 'deduplicated', existing } -- BullMQ emits no event for a job that comes too late to replace
  elseif find(mode, 'e') and ttl > 0 then
    call('SET', de, existing, 'PX', text[ttl])
  end
  local answer = deduplicated(existing, deid, job.id)
  if find(mode, 's') then
    reschedule(existing, tonumber(job.timestamp) or NOW, job.delay)
  end
  return answer
end

-- B-32: the answer for an id that the queue has already, else nil.
local function known(id, name, data)
  local v = redis.pcall('HMGET', PREFIX .. id, 'name', 'data')
  if v.err then -- the job's key is of another type
    return { 'conflict', id }
  elseif not v[1] then
    return nil
  end
  emit('duplicated', 'jobId', id)
  return { v[1] == name and v[2] == data and 'replayed' or 'conflict', id }
end

local NONE = {}
local function add(custom, name, data, opts, timestamp, delay_ms, priority, attempts, payload_h, idem, request_h, extra)
  number = number + 1
  local idem_key = PREFIX .. 'tenure:idem:' .. idem
  if idem ~= '' then
    local kept = redis.pcall('GET', idem_key)
    local kept_id, kept_h = match(type(kept) == 'string' and kept or '', '^(.-) (%S+)$')
    if kept_id then
      return { kept_h == request_h and 'replayed' or 'conflict', kept_id }
    end
  end
  local id = custom ~= '' and custom or text[number]
  local before = custom ~= '' and known(id, name, data)
  if before then
    return before
  end
  if DEPTH_MAX > 0 and depth >= DEPTH_MAX then
    return { 'full', id }
  end
  local more = extra ~= '' and cjson.decode(extra) or NONE
  if more.parent_key and call('EXISTS', more.parent_key) == 0 then
    return { 'orphan', id }
  end
  local job = {
    id = id, name = name, data = data, opts = opts, timestamp = timestamp ~= '' and timestamp or nil,
    delay = tonumber(delay_ms), priority = tonumber(priority), lifo = more.lifo, parent_key = more.parent_key,
    parent = more.parent, deid = more.deid, dedup_ttl = more.dedup_ttl, dedup_mode = more.dedup_mode,
    waits_children = more.waits_children, max_attempts = attempts, payload_h = payload_h,
  }
  local duplicate = job.deid and dedup(job)
  if duplicate then
    return duplicate
  end
  store_job(job)
  depth = depth + 1
  if idem ~= '' then
    call('SET', idem_key, id .. ' ' .. request_h, 'PX', IDEM_MS)
  end
  return { 'created', id }
end

for at = FIRST, #ARGV, WIDTH do
  answers[#answers + 1] = add(unpack(ARGV, at, at + WIDTH - 1))
end
flush()
if REQUEST then
  call('SET', REQUEST, cjson.encode(answers), 'PX', REQUEST_MS)
end
return answers
