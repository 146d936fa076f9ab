-- Keeps one lease. Returns when it ends now, and nil; or nil and why not. `lazy`: write only when it is time.
local function keep(id, token, fence, worker, lazy)
  local job = read_job(id)
  local lock = call('ZSCORE', ACTIVE, id)
  local why = refusal(job, token, fence, lock)
  if why then
    reject(id, job, fence, worker, 'extend')
    return nil, why
  end
  local lease_ms = job.timeout_ms > 0 and job.timeout_ms or 60000
  local held = figure(lock) or 0
  local new = math.max(held, NOW + lease_ms)
  if new == held or (lazy and held - NOW > lease_ms * 0.6) then
    return held, nil, job, lease_ms
  end
  first_sight(job)
  record(job, 'extend', 'active', job.attempt, text[new], job.worker)
  write('HSET', job.key, 'lock_until_ms', text[new], 'updated_ms', NOW_S, 'tn',
    words(job, 'active', text[new], job.worker))
  active_on[#active_on + 1], active_on[#active_on + 2] = text[new], id
  return new, nil, job, lease_ms
end
