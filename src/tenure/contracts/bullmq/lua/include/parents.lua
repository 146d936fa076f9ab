-- What the end or the removal of a child does to its parent, which may be in another queue of the same server (B-22,
-- B-23). finish.lua defines these functions when the first job needs them.

-- The parent's queue prefix, id and link. "bull:mail:17" is job 17 of the queue "bull:mail:", but ids may contain
-- colons. The link, a JSON field of the child, says where the name of the queue ends.
local function parent_of(parent_key, parent_json)
  local link = decoded(parent_json)
  if type(link.queueKey) == 'string' and (type(link.id) == 'string' or type(link.id) == 'number') then
    return link.queueKey .. ':', tostring(link.id), link
  end
  local prefix, id = match(parent_key, '^(.*:)([^:]+)$')
  return prefix or '', id or parent_key, {}
end

local checked_parents = {} -- length of the prefix and parent key: whether it is sound

-- Whether the link names the job of the parent key, and whether the keys of that job and of its queue have the right
-- types. Otherwise the parent is quarantined; its child ends all the same. The child is looked up at the parent key, so
-- a link to another job would let a writer of one queue act on jobs of all others.
local function is_sound_parent(parent_key, prefix, id)
  if prefix .. id ~= parent_key then
    quarantine(parent_key, 'as a parent: the link of its child names ' .. (prefix .. id):sub(1, 200))
    return false
  end
  local function is_sound(key, types)
    for name, expected in pairs(types) do
      local kind = call('TYPE', key .. name).ok
      if kind ~= expected and kind ~= 'none' then
        quarantine(parent_key, 'as a parent: ' .. key .. name .. ' is a ' .. kind .. ', not a ' .. expected)
        return false
      end
    end
    return true
  end
  local checked = #prefix .. ' ' .. parent_key
  if checked_parents[checked] == nil then
    checked_parents[checked] = is_sound(parent_key, { [''] = 'hash', [':dependencies'] = 'set',
        [':processed'] = 'hash', [':failed'] = 'hash', [':unsuccessful'] = 'zset' })
      and is_sound(prefix, { wait = 'list', active = 'list', prioritized = 'zset', delayed = 'zset', marker = 'zset',
        ['waiting-children'] = 'zset', failed = 'zset', meta = 'hash', events = 'stream', pc = 'string',
        ['tenure:journal'] = 'stream' })
  end
  return checked_parents[checked]
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

-- Notes the step in the journal of the parent's queue, if that journal has the parent's earlier history.
local function note_parent(key, prefix, id, kind, to, due)
  local v = call('HMGET', key, 'tn', 'name', 'atm', 'stc', 'ats', 'priority')
  local ver, state = read_tn(v[1])
  if ver == 0 then
    return
  end
  local attempt = text[(whole(v[3]) or 0) + (whole(v[4]) or 0)]
  ver = text[ver + 1]
  call('HSET', key, 'tn', ver .. ' ' .. to .. ' 0 0 - 0')
  note_in(prefix, { id = id, kind = kind, ver = ver, task = v[2], from = state, to = to, attempt = attempt,
    fence = whole(v[5]) and v[5], due = due, priority = v[6] })
end

-- A parent that waits in `set` becomes claimable, at once or after its own delay. BullMQ's event says
-- `waiting-children` as its earlier place, even if that was `delayed`.
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

-- A parent that a child has failed must not run. If it waits for children or for its time, it becomes claimable at
-- once, and its pickup fails it (B-17). If it runs now, it fails when it waits again.
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
  if not is_sound_parent(parent_key, prefix, id) or call('SREM', parent_key .. ':dependencies', child_key) == 0 then
    return
  end
  call('HSET', parent_key .. ':processed', child_key, result)
  if call('SCARD', parent_key .. ':dependencies') == 0 then
    release_parent(prefix, id)
  end
end

-- The child's options say what its failure does: fpof fails the parent, cpof lets the parent run at once, idof and
-- rdof only end the wait for this child. By default the parent goes on waiting.
local function child_failed(child_key, parent_key, parent_json, reason)
  local prefix, id, link = parent_of(parent_key, parent_json)
  if not (link.fpof or link.cpof or link.idof or link.rdof) or not is_sound_parent(parent_key, prefix, id) then
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

-- A parent does not wait for a child that was removed. After the last one the parent goes to the front of `wait`,
-- whatever its delay or priority. When the child goes by a sweep of the parent's own queue, the parent is removed too.
local function child_removed(child_key, parent_key, parent_json, sweeping)
  local prefix, id = parent_of(parent_key, parent_json)
  if not is_sound_parent(parent_key, prefix, id)
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
