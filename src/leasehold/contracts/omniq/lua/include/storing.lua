-- Stores one job, unless its id or idempotency key is known. `p` is the job as the including script was
-- given it: id, payload, max_attempts, timeout_ms, backoff_ms, due, gid, group_limit, task, payload_h, idem,
-- request_h, requester, trace, backoff, backoff_ms_max; texts but for `due`, which is 0 for now.
local lanes, delayed = {}, {}
local has_groups = false
local memory = {}
local stored = 0
local recent = ''
local IDEM_MS = '0'

-- The answer for a job that is known already; nil for a new one.
local function known(p)
  if p.idem ~= '' then
    local first = call('GET', BASE .. ':idem:' .. p.idem)
    if first then
      local request_h, first_id = match(first, '^(%S+) (.*)$')
      return { request_h == p.request_h and 'replayed' or 'conflict', first_id, 0 }
    end
  end
  local v = call('HMGET', JOB .. p.id, 'payload', 'gid', 'task', 'created_ms')
  if v[1] then
    local same = v[1] == p.payload and (v[2] or '') == p.gid and (v[3] or '') == p.task
    return { same and 'replayed' or 'conflict', p.id, tonumber(v[4]) or 0 }
  end
  -- It may have run and gone in the meantime: the answer that said so was lost.
  if recent ~= '' and find(recent, 'p\t' .. p.id .. '\t' .. p.payload_h .. '\n', 1, true) then
    return { 'replayed', p.id, 0 }
  end
  return nil
end

-- A group's limit is set once; one that was about to be forgotten stays.
local function set_group(gid, limit)
  local key = GROUP .. gid .. ':limit'
  if not (tonumber(limit) > 0 and call('SETNX', key, limit) == 1) then
    call('PERSIST', key)
  end
  has_groups = true
end

local function store(p)
  local id, gid = p.id, p.gid
  local later = p.due > NOW
  local due, state = later and text[p.due] or '', later and 'delayed' or 'wait'
  local fields = { 'id', id, 'payload', p.payload, 'state', state, 'attempt', '0', 'max_attempts', p.max_attempts,
    'timeout_ms', p.timeout_ms, 'backoff_ms', p.backoff_ms, 'created_ms', NOW_S, 'updated_ms', NOW_S, 'queued_ms',
    NOW_S, 'first_started_ms', '', 'last_started_ms', '', 'completed_ms', '', 'failed_ms', '',
    'lh', later and '1 0 delayed 0 - - - 0' or '1 0 wait 0 - - - 0' }
  local n = #fields
  local function put(name, value)
    if value ~= '' then
      fields[n + 1], fields[n + 2] = name, value
      n = n + 2
    end
  end
  put('gid', gid)
  put('task', p.task)
  put('due_ms', due)
  put('requester', p.requester)
  put('trace', p.trace)
  if p.backoff ~= '' then
    put('backoff', p.backoff)
    put('backoff_ms_max', p.backoff_ms_max)
  end
  call('HSET', JOB .. id, unpack(fields))
  if gid ~= '' then
    set_group(gid, p.group_limit)
  end
  if later then
    delayed[#delayed + 1], delayed[#delayed + 2] = due, id
  else
    local lane = lanes[gid] or {}
    lane[#lane + 1], lanes[gid] = id, lane
  end
  move(id, nil, state)
  note(id, 'submit', '1', plain(p.task), '', state, '0', '0', '0', '0', '0', '', p.max_attempts, gid,
    '\t' .. p.payload_h .. '\t\t' .. (later and due or '0'))
  if p.idem ~= '' then
    call('SET', BASE .. ':idem:' .. p.idem, p.request_h .. ' ' .. id, 'PX', IDEM_MS)
  end
  stored = stored + 1
  memory[stored] = 'p\t' .. id .. '\t' .. p.payload_h .. '\n'
  return { 'created', id, NOW }
end

local function flush_stored()
  if stored == 0 then
    return
  end
  for gid, ids in pairs(lanes) do
    each_many('RPUSH', lane_of(gid), ids)
    if gid ~= '' then
      group_waiting = group_waiting + #ids
      looked_at[gid] = true
    end
  end
  each_many('ZADD', DELAYED, delayed)
  if has_groups then
    call('SET', BASE .. ':has_groups', '1')
  end
  wake_wanted = true -- a new due time is news as well
  times.last_enqueue_ms = true
  count('submitted', stored)
  flush_groups()
  flush()
end
