-- Moves what has become due into the stream.
-- @include job
-- @include end
-- @include enqueue

-- `limit` bounds one script's time.
local function promote(limit)
  local due = own('ZRANGEBYSCORE', DELAYED, '-inf', NOW_S, 'LIMIT', '0', limit)
  for _, id in ipairs(due) do
    local job, unreadable = read_job(id)
    if unreadable then
      set_aside(id, '-', unreadable)
    elseif job and job.status == 'queued' and job.msg_id == '-' then
      local v = call('HMGET', job.key, 'task', 'payload')
      job.msg_id = enqueue(id, v[1] or '', v[2] or '', 0)
      call('HSET', job.key, 'entry', entry_words(job), 'due_ms', '0')
    end
    call('ZREM', DELAYED, id)
  end
  return #due
end
