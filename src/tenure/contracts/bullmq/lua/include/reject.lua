-- Refuses a write of a worker that does not hold the lease (B-18).

-- Notes the refusal in the journal; returns the answer for the worker. `operation` is the script, as in the journal.
local function reject(operation, id, fence, token_h, reason)
  local v = redis.pcall('HMGET', PREFIX .. id, 'name', 'ats', 'tn')
  local _, state = read_tn(v[3])
  note({ id = id, kind = 'reject', task = v[1], from = state, to = state, fence = fence,
    prev_fence = whole(v[2]) and v[2] or '0', worker = WORKER, error = 'lease_lost', token_h = token_h,
    data = operation })
  return { 'lost', reason }
end

-- The same for a worker whose token is not in the lock.
local function reject_by_lock(operation, id, fence, token_h, lock)
  return reject(operation, id, fence, token_h, lock and 'another worker holds the job' or 'the lock has run out')
end
