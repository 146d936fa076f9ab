-- Stores jobs, each once: an id that is known answers with the job that is there, or as a conflict when it
-- means another one. Due jobs join their lane, later ones wait in `delayed`.
-- KEYS[1] {queue}:meta, the anchor: every other key is named after it and shares its slot
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] instance of the publisher
-- ARGV[3] 1 while an earlier call of the instance may be unanswered  ARGV[4] most unfinished jobs (0: no bound)
-- ARGV[5] how long an idempotency key holds, in ms
-- ARGV[6..] per job: id, payload, max_attempts, timeout_ms, backoff_ms, due_ms (absolute, 0: now), delay_ms, gid,
--   group_limit, task, hash of the payload, idempotency key ('' for none), hash of the request, requester,
--   trace, backoff kind ('' is fixed), most backoff_ms
-- Returns per job { 'created' | 'replayed' | 'conflict' | 'full', id, created_ms }
-- Clauses O-5 O-7 O-12 O-13 O-28 O-29 O-38
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include groups
-- @include recent
local INSTANCE, UNANSWERED, DEPTH_MAX = ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local WIDTH, FIRST = 17, 6
local room = DEPTH_MAX > 0 and DEPTH_MAX - call('ZCARD', IDX .. 'wait') - call('ZCARD', ACTIVE) - call('ZCARD', DELAYED)
local lanes, delayed, due_of_group = {}, {}, {}
local memory = ''
local recent = UNANSWERED and recent_of(INSTANCE) or ''
local stored = 0

local function known(at)
  local id, idem = ARGV[at], ARGV[at + 11]
  if idem ~= '' then
    local first = call('GET', BASE .. ':idem:' .. idem)
    if first then
      local request_h, first_id = match(first, '^(%S+) (.*)$')
      return { request_h == ARGV[at + 12] and 'replayed' or 'conflict', first_id, 0 }
    end
  end
  local v = call('HMGET', JOB .. id, 'payload', 'gid', 'task', 'created_ms')
  if v[1] then
    local same = v[1] == ARGV[at + 1] and (v[2] or '') == ARGV[at + 7] and (v[3] or '') == ARGV[at + 9]
    return { same and 'replayed' or 'conflict', id, tonumber(v[4]) or 0 }
  end
  -- It may have run and gone in the meantime: the answer that said so was lost.
  if recent ~= '' and find(recent, 'p\t' .. id .. '\t' .. ARGV[at + 10] .. '\n', 1, true) then
    return { 'replayed', id, 0 }
  end
  return nil
end

local function set_group(gid, limit)
  local key = GROUP .. gid .. ':limit'
  if tonumber(limit) > 0 then
    if call('SETNX', key, limit) == 0 then
      call('PERSIST', key)
    end
  else
    call('PERSIST', key)
  end
end

local function store(at)
  local id, gid, task = ARGV[at], ARGV[at + 7], ARGV[at + 9]
  local due = tonumber(ARGV[at + 5])
  if tonumber(ARGV[at + 6]) > 0 then
    due = NOW + tonumber(ARGV[at + 6])
  end
  local later = due > NOW
  local state = later and 'delayed' or 'wait'
  local fields = { 'id', id, 'payload', ARGV[at + 1], 'state', state, 'attempt', '0', 'max_attempts', ARGV[at + 2],
    'timeout_ms', ARGV[at + 3], 'backoff_ms', ARGV[at + 4], 'created_ms', NOW_S, 'updated_ms', NOW_S, 'queued_ms',
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
  put('task', task)
  put('due_ms', later and text[due] or '')
  put('requester', ARGV[at + 13])
  put('trace', ARGV[at + 14])
  if ARGV[at + 15] ~= '' then
    put('backoff', ARGV[at + 15])
    put('backoff_ms_max', ARGV[at + 16])
  end
  call('HSET', JOB .. id, unpack(fields))
  if gid ~= '' then
    set_group(gid, ARGV[at + 8])
    due_of_group[gid] = true
  end
  if later then
    delayed[#delayed + 1], delayed[#delayed + 2] = text[due], id
  else
    local lane = lanes[gid] or {}
    lane[#lane + 1], lanes[gid] = id, lane
  end
  move(id, nil, state)
  note(id, 'submit', '1', plain(task), '', state, '0', '0', '0', '0', '0', '', ARGV[at + 2], gid,
    '\t' .. ARGV[at + 10] .. '\t\t' .. (later and text[due] or '0'))
  if ARGV[at + 11] ~= '' then
    call('SET', BASE .. ':idem:' .. ARGV[at + 11], ARGV[at + 12] .. ' ' .. id, 'PX', ARGV[5])
  end
  memory = memory .. 'p\t' .. id .. '\t' .. ARGV[at + 10] .. '\n'
  stored = stored + 1
  return { 'created', id, NOW }
end

local answers = {}
for at = FIRST, #ARGV, WIDTH do
  local answer = known(at)
  if not answer and room and room <= 0 then
    answer = { 'full', ARGV[at], 0 }
  end
  if not answer then
    answer = store(at)
    room = room and room - 1
  end
  answers[#answers + 1] = answer
end
if stored > 0 then
  for gid, ids in pairs(lanes) do
    each_many('RPUSH', lane_of(gid), ids)
    if gid ~= '' then
      group_waiting = group_waiting + #ids
      looked_at[gid] = true
    end
    wake_wanted = true
  end
  each_many('ZADD', DELAYED, delayed)
  if next(due_of_group) then
    call('SET', BASE .. ':has_groups', '1')
  end
  wake_wanted = true -- a new due time is news as well
  times.last_enqueue_ms = true
  count('submitted', stored)
  remember(INSTANCE, memory, UNANSWERED)
  flush_groups()
  flush()
end
return answers
