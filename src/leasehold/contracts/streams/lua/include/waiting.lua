-- Puts a job where the next claim finds it: into the stream, or into the delayed set until it is due.
-- Returns the entry's id, "-" while there is none.
local function enqueue(id, task, payload, due)
  if due > NOW then
    call('ZADD', DELAYED, text[due], id)
    wake()
    return '-'
  end
  return call('XADD', STREAM, '*', 'job_id', id, 'task', task, 'payload', payload)
end

-- When the first delayed job is due, in ms; 0 when there is none.
local function next_due()
  return tonumber(call('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')[2]) or 0
end

-- Moves what has become due into the stream; `limit` bounds one script's time.
local function promote(limit)
  local due = call('ZRANGEBYSCORE', DELAYED, '-inf', NOW_S, 'LIMIT', '0', limit)
  for _, id in ipairs(due) do
    local job = read_job(id)
    if job and job.status == 'queued' and job.msg_id == '-' then
      local v = call('HMGET', job.key, 'task', 'payload')
      job.msg_id = call('XADD', STREAM, '*', 'job_id', id, 'task', v[1], 'payload', v[2])
      call('HSET', job.key, 'lease', lease_words(job), 'due_ms', '0')
    end
    call('ZREM', DELAYED, id)
  end
  return #due
end
