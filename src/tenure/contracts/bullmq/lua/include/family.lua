-- What few jobs need at their end or their beginning: parents, the store of a follower, deduplication, retention,
-- removal. finish.lua makes these functions when the first job needs them.

-- Parents. What the end of a child does to its parent, which may live in another queue of the same server.

-- "bull:mail:17" is job 17 of the queue "bull:mail:"; ids may hold colons, so the parent's own words
-- say where its queue ends.
local function parent_of(parent_key, parent_json)
  local link = decoded(parent_json)
  if type(link.queueKey) == 'string' and (type(link.id) == 'string' or type(link.id) == 'number') then
    return link.queueKey .. ':', tostring(link.id), link
  end
  local prefix, id = match(parent_key, '^(.*:)([^:]+)$')
  return prefix or '', id or parent_key, {}
end

local judged = {}

-- Whether the parent's keys and those of its queue have their types. One that has not is set aside: its child ends
-- all the same.
local function is_sound_parent(parent_key, prefix)
  local function is_sound(key, types)
    for name, wanted in pairs(types) do
      local kind = call('TYPE', key .. name).ok
      if kind ~= wanted and kind ~= 'none' then
        quarantine(parent_key, 'as a parent: ' .. key .. name .. ' is a ' .. kind .. ', not a ' .. wanted)
        return false
      end
    end
    return true
  end
  if judged[parent_key] == nil then
    judged[parent_key] = is_sound(parent_key, { [''] = 'hash', [':dependencies'] = 'set', [':processed'] = 'hash',
        [':failed'] = 'hash', [':unsuccessful'] = 'zset' })
      and is_sound(prefix, { wait = 'list', active = 'list', prioritized = 'zset', delayed = 'zset', marker = 'zset',
        ['waiting-children'] = 'zset', failed = 'zset', meta = 'hash', events = 'stream', pc = 'string',
        ['tenure:journal'] = 'stream' })
  end
  return judged[parent_key]
end

local function delete_job(key)
  call('DEL', key, key .. ':logs', key .. ':dependencies', key .. ':processed', key .. ':failed',
    key .. ':unsuccessful')
end

local function wake_queue(prefix)
  local meta = call('HMGET', prefix .. 'meta', 'paused', 'concurrency')
  if meta[1] then
    return
  end
  if whole(meta[2]) and call('LLEN', prefix .. 'active') >= whole(meta[2]) then
    return
  end
  call('ZADD', prefix .. 'marker', '0', '0')
end

-- The parent was observed by our journal before: its history goes on in its own queue's journal.
local function note_parent(key, prefix, id, kind, to, due)
  local v = call('HMGET', key, 'tn', 'name', 'atm', 'stc', 'ats', 'priority')
  local ver, state = read_tn(v[1])
  if ver == 0 then
    return
  end
  local attempt = text[(whole(v[3]) or 0) + (whole(v[4]) or 0)]
  ver = text[ver + 1]
  call('HSET', key, 'tn', ver .. ' ' .. to .. ' 0 0 - 0')
  redis.pcall('XADD', prefix .. 'tenure:journal', '*', 'e', journal_line({ id = id, kind = kind, ver = ver, task = v[2],
    from = state, to = to, attempt = attempt, fence = whole(v[5]) and v[5], due = due, priority = v[6] }))
end

-- A parent that waits becomes claimable: at once, or after its own delay. BullMQ's event names the same
-- place it came from, whichever that was.
local function release_from(set, prefix, id)
  local key = prefix .. id
  call('ZREM', set, id)
  local v = call('HMGET', key, 'priority', 'delay')
  local priority, wait_ms = whole(v[1]) or 0, whole(v[2]) or 0
  if wait_ms > 0 then
    local due = NOW + wait_ms
    local delayed = prefix .. 'delayed'
    call('ZADD', delayed, due_score(delayed, due), id)
    redis.pcall('XADD', prefix .. 'events', '*', 'event', 'delayed', 'jobId', id, 'delay', text[due])
    local first = call('ZRANGE', delayed, '0', '0', 'WITHSCORES')
    call('ZADD', prefix .. 'marker', text[math.floor(first[2] / SLOTS)], '1')
    return note_parent(key, prefix, id, 'promote', 'delayed', text[due])
  end
  local to = 'waiting'
  if priority > 0 then
    call('ZADD', prefix .. 'prioritized', priority_score(priority, prefix .. 'pc'), id)
    to = 'prioritized'
  else
    call('RPUSH', prefix .. 'wait', id)
  end
  wake_queue(prefix)
  redis.pcall('XADD', prefix .. 'events', '*', 'event', 'waiting', 'jobId', id, 'prev', 'waiting-children')
  note_parent(key, prefix, id, 'promote', to, '0')
end

local function release_parent(prefix, id)
  local set = prefix .. 'waiting-children'
  if call('EXISTS', prefix .. id) == 1 and call('ZSCORE', set, id) then
    release_from(set, prefix, id)
  end
end

-- A parent that a child fails does not run any more: one that waits for children or for its time is
-- claimable at once, and the pickup fails it; one that runs fails when it waits again.
local function fail_parent(prefix, id, why)
  local key = prefix .. id
  if call('EXISTS', key) == 0 or call('ZSCORE', prefix .. 'failed', id) then
    return
  end
  call('HSET', key, 'defa', why)
  local children, delayed = prefix .. 'waiting-children', prefix .. 'delayed'
  if call('ZSCORE', children, id) then
    release_from(children, prefix, id)
  elseif call('ZSCORE', delayed, id) then
    call('HSET', key, 'delay', '0')
    release_from(delayed, prefix, id)
  end
end

local function child_completed(child_key, parent_key, parent_json, result)
  local prefix, id = parent_of(parent_key, parent_json)
  if not is_sound_parent(parent_key, prefix) or call('SREM', parent_key .. ':dependencies', child_key) == 0 then
    return
  end
  call('HSET', parent_key .. ':processed', child_key, result)
  if call('SCARD', parent_key .. ':dependencies') == 0 then
    release_parent(prefix, id)
  end
end

-- What a failed child does is its own choice: fpof fails the parent, cpof lets it go on at once, idof
-- and rdof only stop waiting for this child; by default the parent goes on waiting.
local function child_failed(child_key, parent_key, parent_json, reason)
  local prefix, id, link = parent_of(parent_key, parent_json)
  if not (link.fpof or link.cpof or link.idof or link.rdof) or not is_sound_parent(parent_key, prefix) then
    return
  end
  if call('SREM', parent_key .. ':dependencies', child_key) == 0 then
    return
  end
  if link.fpof then
    call('ZADD', parent_key .. ':unsuccessful', NOW_S, child_key)
    return fail_parent(prefix, id, 'child ' .. child_key .. ' failed')
  end
  if link.cpof or link.idof then
    call('HSET', parent_key .. ':failed', child_key, reason)
  end
  if link.cpof or call('SCARD', parent_key .. ':dependencies') == 0 then
    release_parent(prefix, id)
  end
end

-- A child that is removed is no longer waited for: its parent goes to the front of `wait`, whatever its
-- delay or priority, or when its own queue is swept it goes with the child.
local function child_removed(child_key, parent_key, parent_json, sweeping)
  local prefix, id = parent_of(parent_key, parent_json)
  if not is_sound_parent(parent_key, prefix)
    or call('SREM', parent_key .. ':dependencies', child_key) == 0
    or call('SCARD', parent_key .. ':dependencies') > 0
    or call('ZREM', prefix .. 'waiting-children', id) == 0 then
    return
  end
  if sweeping and prefix == PREFIX then
    local v = call('HMGET', parent_key, 'parentKey', 'parent')
    if v[1] then
      child_removed(parent_key, v[1], v[2], sweeping)
    end
    note_parent(parent_key, prefix, id, 'remove', '', '0')
    return delete_job(parent_key)
  end
  if call('EXISTS', parent_key) == 0 then
    return
  end
  call('RPUSH', prefix .. 'wait', id)
  wake_queue(prefix)
  if not sweeping then -- a sweep emits nothing in other queues
    redis.pcall('XADD', prefix .. 'events', '*', 'event', 'waiting', 'jobId', id, 'prev', 'waiting-children')
  end
  note_parent(parent_key, prefix, id, 'promote', 'waiting', '0')
end

-- Storing a new job: its hash, its events, its list or set, its first journal event. Jobs for the end of `wait`
-- gather in `to_wait`, and are pushed together.

-- `job` has id, name, data, opts (JSON), timestamp, delay (ms), priority, lifo, and where they apply
-- parent_key, parent (JSON), rjk (its scheduler), deid (its deduplication), waits_children; for the
-- journal max_attempts, payload_h.
local function store_job(job)
  local id, key = job.id, PREFIX .. job.id
  local stamp = job.timestamp or NOW_S
  local wait_ms = job.delay or 0
  local due = wait_ms > 0 and tonumber(stamp) + wait_ms or 0
  local state = job.waits_children and 'waiting-children' or due > 0 and 'delayed'
    or job.priority > 0 and 'prioritized' or 'waiting'
  local fields = { 'name', job.name, 'data', job.data, 'opts', job.opts, 'timestamp', stamp,
    'delay', text[wait_ms], 'priority', text[job.priority], 'tn', '1 ' .. state .. ' 0 0 - 0' }
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
  note({ id = id, kind = 'submit', ver = '1', task = job.name, to = state, max_attempts = job.max_attempts,
    due = text[due], payload_h = job.payload_h, priority = text[job.priority] })
  return state
end

-- A job from options that only the JSON tells: the follower of a deduplicated job, or of a scheduler.
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

-- Removal, with what depends on the job: deduplication, parents, retention.
local function forget_dedup(id, deid, prefix)
  prefix = prefix or PREFIX
  local de = prefix .. 'de:' .. deid
  if redis.pcall('GET', de) == id then
    call('DEL', de, prefix .. 'dn:' .. deid)
  end
end

-- The deduplication id is free again, unless it has a time to live of its own. A job that was turned
-- away while this one ran, and asked to be kept, follows now.
local function end_dedup(id, deid)
  local de, dn = PREFIX .. 'de:' .. deid, PREFIX .. 'dn:' .. deid
  if call('PTTL', de) == -1 and redis.pcall('GET', de) == id then
    call('DEL', de)
  end
  if call('TYPE', dn).ok ~= 'hash' then
    return
  end
  local v = call('HMGET', dn, 'name', 'data', 'opts', 'pk', 'pd', 'rjk', 'jid')
  if not v[1] or not v[3] then -- no job can be made of it
    return call('DEL', dn)
  end
  local number = redis.pcall('INCR', ID)
  local next_id = v[7] or text[type(number) == 'number' and number or NOW]
  call('SET', de, next_id) -- held as long as its job lives, so that another can follow that one
  store_from_opts(next_id, v[1], v[2], v[3],
    { deid = deid, parent_key = v[4] or nil, parent = v[5] or nil, rjk = v[6] or nil })
  call('DEL', dn)
end

-- `sweeping` says that the whole queue is swept: a parent that waits for nothing else goes with its child.
local function drop_finished(ids, sweeping)
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

-- What the job's options keep of finished jobs: no older than an age, no more than a count. `limit` bounds
-- how many old ones go at once.
local function retain(set, count, age_s, limit)
  flush_kept()
  if age_s then
    local old = call('ZREVRANGEBYSCORE', set, text[NOW - age_s * 1000], '-inf', 'LIMIT', '0', text[limit or 1000])
    if #old > 0 then
      drop_finished(old)
      each_many('ZREM', set, old)
    end
  end
  if count then
    local old = call('ZREVRANGE', set, text[count], '-1')
    if #old > 0 then
      drop_finished(old)
      call('ZREMRANGEBYRANK', set, '0', text[-(count + 1)])
    end
  end
end

-- What the options say of finished jobs, for scripts that end a job without its worker's help.
local function keep_of(opts_json, name)
  local function bound(value)
    value = tonumber(value)
    return value and value >= 0 and value < NEVER and value or nil -- not NaN either
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
