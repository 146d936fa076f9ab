-- Moves what has become due into the stream.
-- @include job

-- `limit` bounds one script's time.
local function promote(limit)
  local due = call('ZRANGEBYSCORE', DELAYED, '-inf', NOW_S, 'LIMIT', '0', limit)
  for _, id in ipairs(due) do
    local job = read_job(id)
    if job and job.status == 'queued' and job.msg_id == '-' then
      local v = call('HMGET', job.key, 'task', 'payload')
      job.msg_id = call('XADD', STREAM, '*', 'job_id', id, 'task', v[1], 'payload', v[2])
      call('HSET', job.key, 'entry', entry_words(job), 'due_ms', '0')
    end
    call('ZREM', DELAYED, id)
  end
  return #due
end
