-- Schedulers: sets one up, removes one, and stores the next job when the current one starts.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] upsert, declare, follow or remove; declare is an upsert that leaves a scheduler alone which
--   is the same already  ARGV[3] scheduler id
-- ARGV[4] upsert and follow: the next time of a cron pattern, ms ('' if the scheduler has an interval)
-- ARGV[5] the repeat options of the next job, JSON
-- ARGV[6] follow: the id of the job that was picked up; upsert: the name of the scheduler's jobs
-- ARGV[7] data JSON  ARGV[8] options JSON: upsert: of the scheduler's jobs; follow: of the job that was picked up
-- ARGV[9..] upsert: field, value of the scheduler, ...; follow: the name of the job, the prefix of its id
-- Returns the id of the next job, '' if there is none
-- Clauses B-39 B-40
-- @include step
-- @include enqueue
-- @include finish
check_types()
local VERB, NAME = ARGV[2], ARGV[3]
local REPEAT, SCHEDULER = PREFIX .. 'repeat', PREFIX .. 'repeat:' .. ARGV[3]

-- The first time after now that is a multiple of `every` plus `offset`.
local function on_grid(every, offset)
  return math.floor((NOW - offset) / every) * every + every + offset
end

-- The version of a job that was removed, by its id: if it is stored again, its history goes on.
local removed_ver = {}

local function drop_pending(id)
  local key = PREFIX .. id
  if call('EXISTS', key) == 0 then
    return
  end
  local out = call('ZREM', DELAYED, id) + call('ZREM', PRIORITIZED, id)
  if out == 0 and not call('LPOS', ACTIVE, id) then
    out = call('LREM', WAIT, '1', id)
  end
  if out > 0 then
    local ver = read_tn(call('HGET', key, 'tn'))
    removed_ver[id] = ver > 0 and ver + 1 or nil
    relations().drop_jobs({ id })
  end
end

local function store_next(next_ms, name, data, opts_json, repeat_json, stem)
  local id = (stem or 'repeat:' .. NAME .. ':') .. text[next_ms]
  if call('EXISTS', PREFIX .. id) == 1 then
    return ''
  end
  local opts = decoded(opts_json)
  local wait_ms = math.max(0, next_ms - NOW)
  opts['repeat'], opts.jobId, opts.repeatJobKey = cjson.decode(repeat_json), id, NAME
  opts.timestamp, opts.delay = NOW, wait_ms
  opts.attempts = opts.attempts or 0
  opts.prevMillis = opts['repeat'].pattern and next_ms or nil
  local sound, opts_text = pcall(cjson.encode, opts)
  if not sound then -- cjson reads NaN but cannot write it
    return store_next(next_ms, name, data, '{}', repeat_json, stem)
  end
  redis.pcall('INCR', ID)
  call('ZADD', REPEAT, text[next_ms], NAME)
  relations().store_job({
    id = id, name = name, data = data, opts = opts_text, delay = wait_ms, rjk = NAME,
    ver = removed_ver[id] and text[removed_ver[id] + 1],
    priority = tonumber(opts.priority) or 0, lifo = opts.lifo == true,
    max_attempts = text[tonumber(opts.attempts) or 0],
  })
  return id
end

-- B-39: only the current job leads to the next one, so a retry or a late start adds none. The next job has the options
-- of this one. A repeatable job of 5.x has its data in the job only.
local function follow()
  local before = call('ZSCORE', REPEAT, NAME)
  local stem = ARGV[10]
  if not before or ARGV[6] ~= stem .. text[tonumber(before)] then
    return ''
  end
  local v = redis.pcall('HMGET', SCHEDULER, 'name', 'data', 'every', 'offset')
  if v.err then
    quarantine('repeat:' .. NAME, 'the scheduler is a ' .. call('TYPE', SCHEDULER).ok .. ', not a hash')
    v = {}
  end
  local next_ms = whole(ARGV[4])
  if not next_ms then
    local options = cjson.decode(ARGV[5])
    local every = whole(v[3]) or tonumber(options.every)
    if not every or every < 1 then
      return ''
    end
    next_ms = tonumber(before) + every
    if next_ms < NOW then
      next_ms = on_grid(every, whole(v[4]) or tonumber(options.offset) or 0)
    end
  end
  local data = v[2] or ARGV[7]
  local id = store_next(next_ms, v[1] or ARGV[9], data, ARGV[8], ARGV[5], stem)
  if id ~= '' and v[1] then
    redis.pcall('HINCRBY', SCHEDULER, 'ic', '1')
    if data ~= '{}' and not v[2] then
      call('HSET', SCHEDULER, 'data', data)
    end
  end
  return id
end

-- Whether the scheduler has these fields and, but for its counter, no others.
local function has_only(fields)
  local flat = redis.pcall('HGETALL', SCHEDULER)
  local stored, extra = {}, -#fields / 2
  for i = 1, #flat, 2 do
    stored[flat[i]] = flat[i + 1]
    extra = extra + (flat[i] ~= 'ic' and 1 or 0)
  end
  for i = 1, #fields, 2 do
    if stored[fields[i]] ~= fields[i + 1] then
      return false
    end
  end
  return extra == 0
end

local function upsert()
  local before = call('ZSCORE', REPEAT, NAME)
  local fields = { 'name', ARGV[6] }
  local every, offset, start
  for i = 9, #ARGV, 2 do
    fields[#fields + 1], fields[#fields + 2] = ARGV[i], ARGV[i + 1]
    if ARGV[i] == 'every' then every = tonumber(ARGV[i + 1]) end
    if ARGV[i] == 'offset' then offset = tonumber(ARGV[i + 1]) end
    if ARGV[i] == 'startDate' then start = tonumber(ARGV[i + 1]) end
  end
  local next_ms = tonumber(ARGV[4])
  if every then
    next_ms = start and start > NOW and start or offset and on_grid(every, offset) or NOW
    if not offset then
      fields[#fields + 1], fields[#fields + 2] = 'offset', text[next_ms % every]
    end
  end
  if ARGV[8] ~= '' and ARGV[8] ~= '{}' then
    fields[#fields + 1], fields[#fields + 2] = 'opts', ARGV[8]
  end
  if ARGV[7] ~= '' then
    fields[#fields + 1], fields[#fields + 2] = 'data', ARGV[7]
  end
  local pending = before and 'repeat:' .. NAME .. ':' .. text[tonumber(before)]
  if VERB == 'declare' and pending and call('EXISTS', PREFIX .. pending) == 1 and has_only(fields) then
    return pending
  end
  local ic = redis.pcall('HGET', SCHEDULER, 'ic') -- a key of another type is replaced
  ic = whole(type(ic) == 'string' and ic) or 0
  if pending then
    drop_pending(pending)
  end
  call('DEL', SCHEDULER)
  fields[#fields + 1], fields[#fields + 2] = 'ic', text[ic + 1]
  call('HSET', SCHEDULER, unpack(fields))
  return store_next(next_ms, ARGV[6], ARGV[7] ~= '' and ARGV[7] or '{}', ARGV[8], ARGV[5])
end

local function remove()
  local before = call('ZSCORE', REPEAT, NAME)
  if not before then
    return ''
  end
  local id = 'repeat:' .. NAME .. ':' .. text[tonumber(before)]
  if call('ZREM', DELAYED, id) == 1 then
    relations().drop_jobs({ id })
    emit('removed', 'jobId', id, 'prev', 'delayed')
  end
  call('ZREM', REPEAT, NAME)
  call('DEL', SCHEDULER)
  return id
end

local answer = VERB == 'follow' and follow() or VERB == 'remove' and remove() or upsert()
flush()
return answer
