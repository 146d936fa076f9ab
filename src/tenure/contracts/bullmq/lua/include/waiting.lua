-- Puts a job where the next claim finds it: `wait`, `prioritized` by its priority, or `delayed` until
-- it is due. Each returns the state the job is in then.

-- Equal priorities keep their order by a counter in the lower half of the score.
local function priority_score(priority, counter)
  local place = redis.pcall('INCR', counter)
  if type(place) == 'table' then -- no count: it is begun anew
    call('DEL', counter)
    place = call('INCR', counter)
  end
  return text[priority * 4294967296 + place % 4294967296]
end

local function prioritize(id, priority)
  put('ZADD', PRIORITIZED, priority_score(priority, PC), id)
  wake()
  return 'prioritized'
end

local function wait_at_end(id, priority)
  if priority > 0 then
    return prioritize(id, priority)
  end
  put('LPUSH', WAIT, id)
  wake()
  return 'waiting'
end

-- Before all others: handed back, or taken back from a worker that died.
local function wait_at_front(id, priority)
  if priority > 0 then
    put('ZADD', PRIORITIZED, text[priority * 4294967296], id)
    wake()
    return 'prioritized'
  end
  put('RPUSH', WAIT, id)
  wake()
  return 'waiting'
end

-- The score of a due time: jobs due in the same millisecond keep their order.
local function due_score(key, due)
  local least = due * SLOTS
  local most = least + SLOTS - 1
  local last = redis.pcall('ZREVRANGEBYSCORE', key, text[most], text[least], 'WITHSCORES', 'LIMIT', '0', '1')
  if last[2] then
    return text[math.min(tonumber(last[2]) + 1, most)]
  end
  return text[least]
end

local function delay(id, due)
  put('ZADD', DELAYED, due_score(DELAYED, due), id)
  emit('delayed', 'jobId', id, 'delay', text[due])
  due_changed = true
  return 'delayed'
end

-- Makes claimable what has become due, in the order of its due times.
local function promote()
  local due = call('ZRANGEBYSCORE', DELAYED, '-inf', text[(NOW + 1) * SLOTS - 1], 'LIMIT', '0', '1000')
  if #due == 0 then
    return 0
  end
  each_many('ZREM', DELAYED, due)
  local promoted = 0
  for _, id in ipairs(due) do
    local key = PREFIX .. id
    local priority = redis.pcall('HGET', key, 'priority')
    if type(priority) == 'table' then
      quarantine(id, 'its key is a ' .. call('TYPE', key).ok .. ', not a hash')
    elseif priority or call('EXISTS', key) == 1 then
      wait_at_end(id, whole(priority) or 0)
      emit('waiting', 'jobId', id, 'prev', 'delayed')
      call('HSET', key, 'delay', '0')
      promoted = promoted + 1
    end
  end
  return promoted
end
