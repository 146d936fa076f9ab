-- The fence. A caller may end or keep a lease when its token is the job's and, where it names one, its
-- fence too. Returns nil, or OmniQ's word for why not, in the order of its checks.
local function refusal(job, token, fence, is_active)
  if token == '' then
    return 'TOKEN_REQUIRED'
  end
  if not job or job.token ~= token then
    return 'TOKEN_MISMATCH'
  end
  if fence ~= '' and tonumber(fence) ~= job.fence and job.known then
    return 'TOKEN_MISMATCH'
  end
  -- While damage is not repaired, the table of leases may lack some: then the hash alone proves them.
  if job.state ~= 'active' or not (is_active or call('HEXISTS', BASE .. ':upkeep', 'recount') == 1) then
    return 'NOT_ACTIVE'
  end
  return nil
end

-- A stale holder is told so, and the history shows that nothing was changed.
local function reject(id, job, fence, worker, what)
  local state = job and job.state or ''
  note(id, 'reject', '0', job and plain(job.task) or '', state, state, '0', fence ~= '' and fence or '0',
    job and text[job.fence] or '0', '0', '0', worker, '0', job and job.gid or '', '\t\tlease_lost\t0\t' .. what)
  count('rejected')
end
