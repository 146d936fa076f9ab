-- Ends a job for good: hash first, terminal event second; the entry is acknowledged after that (S-14).
local function finish(job, task, to, kind, field, body, step, data, error_code, result_h)
  local from, lease, worker = job.status, job.lease_until, job.worker
  job.ver, job.lease_until, job.status = job.ver + 1, '0', to
  call('HSET', job.key, 'status', to, 'updated_ts', NOW_S, 'lease', lease_words(job), field, body)
  emit(job.key, to, step, data, job.ttl_s)
  local fence = text[job.fence]
  local rest = job.max_attempts .. '\t' .. result_h
  if error_code ~= '' then
    rest = more(job.max_attempts, result_h, '', error_code, '0', '')
  end
  note(job.id, kind, text[job.ver], task, from, to, text[job.attempt], fence, fence, '0', lease,
    worker, rest)
  count(to)
end

local function drop_entry(msg_id)
  if msg_id ~= '-' then
    redis.pcall('XACK', STREAM, GROUP, msg_id)
    call('XDEL', STREAM, msg_id)
  end
end
