-- Stores a new job: its hash, its events, its place in the line, its first line of the journal. Jobs for
-- the end of `wait` gather in `line`, and leave by one push.

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
  if type(redis.pcall('HSET', key, unpack(fields))) == 'table' then -- another type stands where the job belongs
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
      line[#line + 1] = id
    end
    emit('waiting', 'jobId', id, 'timestamp', NOW_S)
  end
  if job.parent_key then
    redis.pcall('SADD', job.parent_key .. ':dependencies', key)
  end
  note(id, 'submit', '1', NOW_S, plain(job.name), '', state, '0', '0', '0', '0', '0', '',
    job.max_attempts or '0', text[due], '', job.payload_h or '', '', '', text[job.priority])
  return state
end

-- A job from options that only the JSON tells: the follower of a deduplicated job, or of a scheduler.
local function store_from_opts(id, name, data, opts_json, extra)
  local ok, opts = pcall(cjson.decode, opts_json)
  opts = ok and type(opts) == 'table' and opts or {}
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
