-- Ends a job: first the hash, then the terminal event. The caller acknowledges the entry after that (S-14).
local function finish(job, task, to, kind, field, body, step, data, error_code, result_h)
  local from, lease, worker = job.status, job.lease_until, job.worker
  job.ver, job.lease_until, job.status = job.ver + 1, '0', to
  call('HSET', job.key, 'status', to, 'updated_ts', NOW_S, 'lease', lease_field(job), field, body)
  emit(job.key, to, step, data, job.ttl_s)
  local rest = job.max_attempts .. '\t' .. result_h
  if error_code ~= '' then
    rest = more(job.max_attempts, result_h, '', error_code, '0', '')
  end
  record(job, kind, task, from, to, lease, worker, rest)
  count(to)
end

local function drop_entry(msg_id)
  if msg_id ~= '-' then
    pcall('XACK', STREAM, GROUP, msg_id)
    pcall('XDEL', STREAM, msg_id)
  end
end

-- A reply as one short text.
local function flat_text(value)
  if type(value) ~= 'table' then
    return string.sub(tostring(value), 1, 200)
  end
  local parts = {}
  for i = 1, math.min(#value, 20) do
    parts[i] = flat_text(value[i])
  end
  return table.concat(parts, ' ')
end

-- Quarantines a job that cannot be read, or an entry (`flat`) that names no job; the entry leaves the queue. If the key
-- is a hash, the job ends in `error`, so that its followers are informed. A key of another type is left as it is,
-- because it may belong to another program.
local function quarantine_job(id, msg_id, why, flat)
  local CONTENT = {
    string = { 'GETRANGE', '0', '999' },
    list = { 'LRANGE', '0', '9' },
    set = { 'SRANDMEMBER', '10' },
    zset = { 'ZRANGE', '0', '9' },
    stream = { 'XRANGE', '-', '+', 'COUNT', '3' },
    hash = { 'HMGET', 'status', 'lease', 'entry', 'ttl_s', 'created_ts', 'task', 'payload' },
  }
  local key = job_key(id)
  local kind = is_id(id) and call('TYPE', key)['ok'] or 'none'
  local read = CONTENT[kind]
  quarantine().add(id, why, flat_text(read and pcall(read[1], key, unpack(read, 2)) or flat or ''))
  if kind == 'hash' then
    local message = string.gsub(quarantine().printable(why, 300), '[\\"]', '?')
    local body = '{"code":"unreadable","message":"' .. message .. '","retryable":false}'
    local ttl_s = call('HGET', key, 'ttl_s')
    call('HSET', key, 'status', 'error', 'updated_ts', NOW_S, 'error', body)
    emit(key, 'error', 'worker.quarantine', '{"error":' .. body .. '}', ttl_s)
    record_no_job((string.gsub(id, '%c', '?')), 'reject', '', '', more('0', '', '', 'unreadable', '0', message))
  end
  drop_entry(msg_id)
end
