-- Puts a job where the next claim finds it: into the stream, or into the delayed set until it is due.
-- @include step

-- Wakes workers that wait with an empty queue, for what does not show in the stream itself.
local function wake()
  own('XADD', WAKE, 'MAXLEN', '1', '*', 'w', '1')
end

-- Returns the entry's id, "-" while there is none.
local function enqueue(id, task, payload, due)
  if due > NOW then
    own('ZADD', DELAYED, format('%d', due), id)
    wake()
    return '-'
  end
  return own('XADD', STREAM, '*', 'job_id', id, 'task', task, 'payload', payload)
end
