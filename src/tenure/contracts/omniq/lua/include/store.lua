-- Stores jobs, unless their id or idempotency key is known. Consecutive jobs that differ only in id, payload, group,
-- trace and key are a run, and what they have in common is its shape. A long run writes the shape once, as a template,
-- and copies it for each job; COPY fails if the id is known.
local COPY_FROM = 4 -- without copies, a bulk submit costs 1.7 times the Redis CPU (2026-11-18)
local TEMPLATE = BASE .. ':template' -- deleted when the script ends
local lanes, delayed, seen_groups = {}, {}, {}
local on_wait, on_delayed = moved.on.wait, moved.on.delayed
local has_groups, has_template = false, false
local memory = {}
local stored = 0

-- Completes a shape. `s` has the texts max_attempts, timeout_ms, backoff_ms, group_limit, task, requester, backoff and
-- backoff_ms_max, and the number `due`, 0 for now. `rows` is the number of jobs that have the shape.
local function shape_of(s, rows)
  local later = s.due > NOW
  local due, state = later and text[s.due] or '0', later and 'delayed' or 'wait'
  local fields = { 'id', '', 'payload', '', 'state', state, 'attempt', '0', 'max_attempts', s.max_attempts,
    'timeout_ms', s.timeout_ms, 'backoff_ms', s.backoff_ms, 'created_ms', NOW_S, 'updated_ms', NOW_S, 'queued_ms',
    NOW_S, 'first_started_ms', '', 'last_started_ms', '', 'completed_ms', '', 'failed_ms', '',
    'tn', later and '1 0 delayed 0 - - - 0' or '1 0 wait 0 - - - 0' }
  local n = #fields
  local function put(name, value)
    if value ~= '' then
      fields[n + 1], fields[n + 2] = name, value
      n = n + 2
    end
  end
  put('task', s.task)
  put('due_ms', later and due or '')
  put('requester', s.requester)
  if s.backoff ~= '' then
    put('backoff', s.backoff)
    put('backoff_ms_max', s.backoff_ms_max)
  end
  s.fields, s.n, s.later, s.due = fields, n, later, due
  -- The journal line without id, group and hash of the payload; see `note`.
  s.line = '\tsubmit\t1\t' .. NOW_S .. '\t' .. plain(s.task) .. '\t\t' .. state .. '\t0\t0\t0\t0\t0\t\t'
    .. s.max_attempts .. '\t'
  s.line_end = '\t\t' .. due
  s.copies = rows >= COPY_FROM
  if s.copies then
    call('DEL', TEMPLATE)
    write('HSET', TEMPLATE, unpack(fields, 5, n))
    has_template = true
  end
  return s
end

-- The answer for an idempotency key that is known; nil for a new one.
local function used(idem, request_h)
  local first = call('GET', BASE .. ':idem:' .. idem)
  if first then
    local first_h, first_id = match(first, '^(%S+) (.*)$')
    return first_h and { first_h == request_h and 'replayed' or 'conflict', first_id, 0 } or nil
  end
  return nil
end

-- The answer for a job that is known; nil for a new one.
local function known(s, id, payload, gid)
  local v = call('HMGET', JOB .. id, 'payload', 'gid', 'task', 'created_ms')
  if v[1] then
    local same = v[1] == payload and (v[2] or '') == gid and (v[3] or '') == s.task
    return { same and 'replayed' or 'conflict', id, figure(v[4], 0) or 0 }
  end
  return nil
end

-- Sets a group's limit if it has none, and keeps an existing limit from expiring.
local function set_group(gid, limit)
  if seen_groups[gid] == limit then
    return
  end
  local key = GROUP .. gid .. ':limit'
  if not ((tonumber(limit) or 0) > 0 and call('SETNX', key, limit) == 1) then
    call('PERSIST', key)
  end
  seen_groups[gid] = limit
  has_groups = true
end

-- Writes a job's hash field by field.
local function write_job(s, id, payload, gid, trace)
  local fields, n = s.fields, s.n
  fields[2], fields[4] = id, payload
  if gid ~= '' then
    fields[n + 1], fields[n + 2] = 'gid', gid
    n = n + 2
  end
  if trace ~= '' then
    fields[n + 1], fields[n + 2] = 'trace', trace
    n = n + 2
  end
  write('HSET', JOB .. id, unpack(fields, 1, n))
end

-- Writes a job's hash by copying the template; false if the key exists.
local function copy(id, payload, gid, trace)
  local key = JOB .. id
  if call('COPY', TEMPLATE, key) == 0 then
    return false
  end
  if gid == '' and trace == '' then
    write('HSET', key, 'id', id, 'payload', payload)
  elseif trace == '' then
    write('HSET', key, 'id', id, 'payload', payload, 'gid', gid)
  elseif gid == '' then
    write('HSET', key, 'id', id, 'payload', payload, 'trace', trace)
  else
    write('HSET', key, 'id', id, 'payload', payload, 'gid', gid, 'trace', trace)
  end
  return true
end

-- Stores a job. Returns nil, or the answer if it turns out that the id is known.
local function store(s, id, payload, payload_h, gid, trace)
  if not s.copies then
    write_job(s, id, payload, gid, trace)
  elseif not copy(id, payload, gid, trace) then
    local answer = known(s, id, payload, gid)
    if answer then
      return answer
    end
    write_job(s, id, payload, gid, trace) -- the key existed, but was not a job
  end
  if gid ~= '' then
    set_group(gid, s.group_limit)
  end
  stored = stored + 1
  if s.later then
    local n = #delayed
    delayed[n + 1], delayed[n + 2] = s.due, id
    on_delayed[n + 1], on_delayed[n + 2] = NOW_S, id
    dirty.delayed = true
  else
    local lane = lanes[gid]
    if not lane then
      lane = {}
      lanes[gid] = lane
    end
    lane[#lane + 1] = id
    local n = #on_wait
    on_wait[n + 1], on_wait[n + 2] = NOW_S, id
    dirty.wait = true
  end
  add_line(plain(id), s.line .. plain(gid) .. '\t\t' .. payload_h .. s.line_end)
  memory[stored] = 'p\t' .. id .. '\t' .. payload_h .. '\n'
  return nil
end

local function flush_stored()
  if has_template then
    call('DEL', TEMPLATE)
  end
  if stored == 0 then
    return
  end
  for gid, ids in pairs(lanes) do
    each_many('RPUSH', lane_of(gid), ids)
    if gid ~= '' then
      group_waiting = group_waiting + #ids
      changed_groups[gid] = true
    end
  end
  each_many('ZADD', DELAYED, delayed)
  if has_groups then
    call('SET', BASE .. ':has_groups', '1')
  end
  needs_wake = true -- waiting workers need a new due time too
  times.last_enqueue_ms = true
  count('submitted', stored)
  flush_groups()
  flush()
end
