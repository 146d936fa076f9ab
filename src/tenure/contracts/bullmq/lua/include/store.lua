-- Storing a new job, and what few jobs need at their end: deduplication, retention, removal.
-- finish.lua defines these functions when the first job needs them.

-- Stores a job: its hash, its events, its list or set, its first journal event. Jobs for the end of `wait` gather in
-- `to_wait` and are pushed together.
-- `job` has id, name, data, opts (JSON), timestamp, delay (ms), priority, lifo, and if they apply parent_key, parent
-- (JSON), rjk (its scheduler), deid (its deduplication id), waits_children; for the journal max_attempts, payload_h.
local function store_job(job)
  local id, key = job.id, PREFIX .. job.id
  local stamp = job.timestamp or NOW_S
  local wait_ms = job.delay or 0
  local ver = job.ver or '1'
  local due = wait_ms > 0 and tonumber(stamp) + wait_ms or 0
  local state = job.waits_children and 'waiting-children' or due > 0 and 'delayed'
    or job.priority > 0 and 'prioritized' or 'waiting'
  local fields = { 'name', job.name, 'data', job.data, 'opts', job.opts, 'timestamp', stamp,
    'delay', text[wait_ms], 'priority', text[job.priority], 'tn', ver .. ' ' .. state .. ' 0 0 - 0' }
  local n = #fields
  if job.parent_key then
    fields[n + 1], fields[n + 2], fields[n + 3], fields[n + 4] =
      'parentKey', job.parent_key, 'parent', job.parent
    n = n + 4
  end
  if job.rjk then
    fields[n + 1], fields[n + 2] = 'rjk', job.rjk
    n = n + 2
  end
  if job.deid then
    fields[n + 1], fields[n + 2] = 'deid', job.deid
  end
  if type(redis.pcall('HSET', key, unpack(fields))) == 'table' then -- the key is of another type
    quarantine(id, 'its key is a ' .. call('TYPE', key).ok .. ', not a hash')
    call('DEL', key)
    call('HSET', key, unpack(fields))
  end
  emit('added', 'jobId', id, 'name', job.name)
  if state == 'waiting-children' then
    put('ZADD', CHILDREN, stamp, id)
    emit('waiting-children', 'jobId', id)
  elseif state == 'delayed' then
    delay(id, due)
  else
    if state == 'prioritized' then
      prioritize(id, job.priority)
    elseif job.lifo then
      put('RPUSH', WAIT, id)
      wake()
    else
      to_wait[#to_wait + 1] = id
    end
    emit('waiting', 'jobId', id, 'timestamp', NOW_S)
  end
  if job.parent_key then
    redis.pcall('SADD', job.parent_key .. ':dependencies', key)
  end
  note({ id = id, kind = 'submit', ver = ver, task = job.name, to = state, max_attempts = job.max_attempts,
    due = text[due], payload_h = job.payload_h, priority = text[job.priority] })
  return state
end

-- Stores a job whose options are known as JSON only.
local function store_from_opts(id, name, data, opts_json, extra)
  local opts = decoded(opts_json)
  local job = {
    id = id, name = name, data = data, opts = opts_json, delay = tonumber(opts.delay) or 0,
    priority = tonumber(opts.priority) or 0, lifo = opts.lifo == true,
    max_attempts = text[tonumber(opts.attempts) or 0],
  }
  for field, value in pairs(extra) do
    job[field] = value
  end
  return store_job(job)
end

local function forget_dedup(id, deid, prefix)
  prefix = prefix or PREFIX
  local de = prefix .. 'de:' .. deid
  if redis.pcall('GET', de) == id then
    call('DEL', de, prefix .. 'dn:' .. deid)
  end
end

-- B-7: frees the deduplication id, unless it has a time to live of its own. If a job was turned away while this one
-- ran and asked to be kept (keepLastIfActive), it is stored now.
local function end_dedup(id, deid)
  local de, dn = PREFIX .. 'de:' .. deid, PREFIX .. 'dn:' .. deid
  if call('PTTL', de) == -1 and redis.pcall('GET', de) == id then
    call('DEL', de)
  end
  if call('TYPE', dn).ok ~= 'hash' then
    return
  end
  local v = call('HMGET', dn, 'name', 'data', 'opts', 'pk', 'pd', 'rjk', 'jid')
  if not v[1] or not v[3] then -- not enough for a job
    return call('DEL', dn)
  end
  local number = redis.pcall('INCR', ID)
  local next_id = v[7] or text[type(number) == 'number' and number or NOW]
  call('SET', de, next_id) -- held until that job ends, so that another can follow it
  store_from_opts(next_id, v[1], v[2], v[3],
    { deid = deid, parent_key = v[4] or nil, parent = v[5] or nil, rjk = v[6] or nil })
  call('DEL', dn)
end

-- Removes jobs that are in no list any more. With `sweeping`, a parent in the same queue that waits for nothing else is
-- removed with its child.
local function drop_jobs(ids, sweeping)
  for _, id in ipairs(ids) do
    local key = PREFIX .. id
    local v = redis.pcall('HMGET', key, 'parentKey', 'deid', 'parent', 'tn', 'name', 'ats')
    if v[1] then
      child_removed(key, v[1], v[3], sweeping)
    end
    if v[2] then
      forget_dedup(id, v[2])
    end
    local ver, state = read_tn(v[4])
    if ver > 0 then
      note({ id = id, kind = 'remove', ver = text[ver + 1], task = v[5], from = state, fence = whole(v[6]) and v[6] })
    end
    delete_job(key)
  end
end

-- B-25: removes finished jobs that are older than an age or beyond a count. `limit` bounds how many old ones one call
-- removes.
local function retain(set, count, age_s, limit)
  flush_finished()
  if age_s then
    local old = call('ZREVRANGEBYSCORE', set, text[NOW - age_s * 1000], '-inf', 'LIMIT', '0', text[limit or 1000])
    if #old > 0 then
      drop_jobs(old)
      each_many('ZREM', set, old)
    end
  end
  if count then
    local old = call('ZREVRANGE', set, text[count], '-1')
    if #old > 0 then
      drop_jobs(old)
      call('ZREMRANGEBYRANK', set, '0', text[-(count + 1)])
    end
  end
end

-- B-25: count, age and limit of removeOnComplete or removeOnFail, for scripts that end a job without its worker.
local function keep_of(opts_json, name)
  local function bound(value)
    value = tonumber(value)
    return value and value >= 0 and value < NEVER and value or nil -- NaN fails both comparisons
  end
  local keep = decoded(opts_json)[name]
  if keep == true then
    return 0, nil
  elseif type(keep) == 'number' then
    return bound(keep), nil
  elseif type(keep) == 'table' then
    return bound(keep.count), bound(keep.age), bound(keep.limit)
  end
  return nil, nil
end
