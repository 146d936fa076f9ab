-- The fence. A holder is the current owner when the job runs under its fence and token. Once its
-- lease is over, the group's pending list must not name somebody else for the entry either: a foreign
-- worker that took it over writes no fence, but it cannot hide there. Returns nil, or why it is lost.
local function why_lost(job, unreadable, msg_id, fence, token)
  if not job then
    return unreadable or 'the job has expired or was removed'
  end
  if job.fence ~= fence or job.worker ~= token then
    return 'another worker holds the job (fence ' .. job.fence .. ', yours is ' .. fence .. ')'
  end
  if job.status ~= 'running' then
    return 'the job is ' .. job.status
  end
  if tonumber(job.lease_until) > NOW then
    return nil
  end
  local pending = pcall('XPENDING', STREAM, GROUP, msg_id, msg_id, '1')
  if pending[1] and pending[1][2] ~= token then
    return 'the stream entry was taken over by ' .. quarantine().printable(pending[1][2], 128)
  end
  return nil
end

-- A stale holder is told so, and the history shows that nothing was changed.
local function reject(id, task, job, fence, token, why)
  local status = job and job.status or ''
  note(id, 'reject', '0', task, status, status, '0', text[fence], job and text[job.fence] or '0',
    '0', '0', token, more('0', '', '', 'lease_lost', '0', why))
  count('rejected')
end
