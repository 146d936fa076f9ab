-- Puts a job where a later claim finds it: into `wait`, into `prioritized` under its priority, or into `delayed` until
-- it is due. Each function returns the new state of the job.

-- B-4: a counter in the lower half of the score keeps jobs of equal priority in order.
local function priority_score(priority, counter)
  local place = redis.pcall('INCR', counter)
  if type(place) == 'table' then -- not a count: start anew
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

-- For a job that was released, or reclaimed from a worker that died: it runs next.
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

-- The score of a due time. Jobs that are due in the same millisecond keep their order.
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
  must_mark_due = true
  return 'delayed'
end

-- B-12: moves jobs that are due from `delayed` to `wait` or `prioritized`, in the order of their due times.
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
