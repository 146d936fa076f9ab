-- Jobs, their lanes and groups, and the check that every holder of a lease has to pass.

-- Lanes. Ungrouped jobs wait in one list. Each group has its own list, count of leased jobs and limit; it is in the
-- sorted set of ready groups while it has work and a free slot.
local freed_slots, changed_groups = {}, {}
local GROUP_IDLE_MS = '604800000' -- how long the limit of an idle group is kept

local function lane_of(gid)
  return gid and gid ~= '' and GROUP .. gid .. ':wait' or WAIT
end

local function slots_of(gid)
  local v = call('MGET', GROUP .. gid .. ':limit', GROUP .. gid .. ':inflight')
  local limit = figure(v[1], 1) or 1
  return limit > 0 and limit or 1, math.max(0, figure(v[2], 0) or 0)
end

-- Adds a job to its lane: at the end, or in front if it comes back without having failed.
local function join_lane(id, gid, in_front)
  call(in_front and 'LPUSH' or 'RPUSH', lane_of(gid), id)
  if gid and gid ~= '' then
    group_waiting = group_waiting + 1
    changed_groups[gid] = true
  end
  needs_wake = true
end

local function free_slot(gid)
  if gid and gid ~= '' then
    freed_slots[gid] = (freed_slots[gid] or 0) + 1
  end
end

local ready, ready_n = {}, 0

local function make_ready(gid)
  ready[ready_n + 1], ready[ready_n + 2] = NOW_S, gid
  ready_n = ready_n + 2
end

-- A group without waiting and running jobs keeps only its limit, for a week.
local function forget_group(gid)
  call('DEL', GROUP .. gid .. ':inflight')
  call('PEXPIRE', GROUP .. gid .. ':limit', GROUP_IDLE_MS)
end

-- Writes the slots that ended leases freed. All counts are read by one command and written by one.
local function flush_freed()
  local gids, keys = {}, {}
  for gid in pairs(freed_slots) do
    gids[#gids + 1] = gid
    keys[#keys + 1] = GROUP .. gid .. ':inflight'
  end
  if #gids == 0 then
    return
  end
  local counts, set, n = call('MGET', unpack(keys)), {}, 0
  for i, gid in ipairs(gids) do
    local left = (figure(counts[i], 0) or 0) - freed_slots[gid]
    if left > 0 then
      set[n + 1], set[n + 2], n = keys[i], text[left], n + 2
      changed_groups[gid] = true
    elseif call('EXISTS', lane_of(gid)) == 0 then
      forget_group(gid)
      changed_groups[gid] = nil
    else
      set[n + 1], set[n + 2], n = keys[i], '0', n + 2
      make_ready(gid) -- none of its jobs runs, and a limit is at least 1
      changed_groups[gid] = nil
    end
  end
  if n > 0 then
    call('MSET', unpack(set))
  end
  freed_slots = {}
end

-- Makes groups ready that got work or a free slot.
local function flush_groups()
  flush_freed()
  for gid in pairs(changed_groups) do
    local limit, inflight = slots_of(gid)
    if inflight < limit and call('EXISTS', lane_of(gid)) == 1 then
      make_ready(gid)
    end
  end
  changed_groups = {}
  if ready_n > 0 then
    dirty.groups = true
    needs_wake = true
    for from = 1, ready_n, MANY do
      call('ZADD', READY, 'NX', unpack(ready, from, math.min(from + MANY - 1, ready_n)))
    end
    ready, ready_n = {}, 0
  end
end

-- A job's hash, with our own state of it in the field `tn` (see head.lua).
local NEW_TN = '1 0 wait 0 - - - 0' -- of a job that waits since it was published
local STATES = { wait = true, active = true, delayed = true, failed = true, completed = true }
local TN = '^(%d+) (%d+) (%S+) (%d+) (%S+) (%S+) (%S+) (%d+)$'

local function number(value)
  return figure(value, 0) or 0
end

-- A job from the values of `HMGET state attempt max_attempts timeout_ms gid lease_token tn task cancel lock_until_ms`.
local function job_of(id, key, v)
  local job = { id = id, key = key, state = v[1], attempt = number(v[2]), max_attempts = number(v[3]),
    timeout_ms = number(v[4]), gid = v[5] or '', token = v[6] or '', task = v[8] or '', cancel = v[9] == '1',
    lock = v[10] or '' }
  local ver, fence, was, lease, worker, token, kind, due = match(v[7] or '', TN)
  job.known = ver and #ver < 16 and #fence < 16 and true or false
  if not job.known then
    ver, fence, was, lease, worker, token, kind, due = nil
  end
  job.ver, job.fence, job.was, job.lease = number(ver), number(fence), was or v[1], lease or '0'
  job.worker = worker or '-'
  job.settled_token, job.settled_kind, job.settled_due = token or '-', kind or '-', due or '0'
  if job.max_attempts < 1 then
    job.max_attempts = 1
  end
  return job
end

-- The job; nil if there is none or it cannot be read.
local function read_job(id)
  local key = JOB .. id
  local v = call('HMGET', key, 'state', 'attempt', 'max_attempts', 'timeout_ms', 'gid', 'lease_token', 'tn',
    'task', 'cancel', 'lock_until_ms')
  if not STATES[v[1]] then
    quarantine(key, 'the state ' .. string.sub(v[1] or '', 1, 40) .. ' is not a state of a job')
    return nil
  end
  return job_of(id, key, v)
end

-- The state from which the next journal event starts: that of our last event, if the job was at most promoted since;
-- otherwise that of the hash, because another client has changed the job.
local function state_left(job)
  if job.state == job.was or (job.state == 'wait' and job.was == 'delayed') or job.taken_back then
    return job.was
  end
  return job.state
end

-- The field `tn` after a step.
local function tn_field(job, state, lease, worker)
  return text[job.ver] .. ' ' .. text[job.fence] .. ' ' .. state .. ' ' .. lease .. ' ' .. worker .. ' '
    .. job.settled_token .. ' ' .. job.settled_kind .. ' ' .. job.settled_due
end

-- A job that another client published gets its `submit` event when one of our scripts first changes it.
local function ensure_known(job)
  if job.known then
    return
  end
  job.known, job.ver, job.fence, job.was = true, 1, 0, job.state
  note(job.id, 'submit', '1', plain(job.task), '', job.state == 'delayed' and 'delayed' or 'wait', '0', '0',
    '0', '0', '0', '', text[job.max_attempts], job.gid, '\t\t\t0\tseen')
end

-- Records one step of a job in the journal.
local function record(job, kind, to, attempt, lease, worker, rest)
  local fence = text[job.fence]
  job.ver = job.ver + 1
  note(job.id, kind, text[job.ver], plain(job.task), state_left(job), to, text[attempt], fence, fence, lease,
    job.lease, worker == '-' and '' or worker, text[job.max_attempts], job.gid, rest)
end

-- The fence. A caller may end or extend a lease if its token is the job's and, if it names one, its fence too. Returns
-- nil, or OmniQ's reason, in the order of OmniQ's checks.
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
  -- While a repair is due, leases may be missing in the table: then the hash alone decides.
  if job.state ~= 'active' or not (is_active or call('HEXISTS', BASE .. ':upkeep', 'recount') == 1) then
    return 'NOT_ACTIVE'
  end
  return nil
end

-- Records in the journal that a stale holder was refused and nothing was changed.
local function reject(id, job, fence, worker, what)
  local state = job and job.state or ''
  note(id, 'reject', '0', job and plain(job.task) or '', state, state, '0', fence ~= '' and fence or '0',
    job and text[job.fence] or '0', '0', '0', worker, '0', job and job.gid or '', '\t\tlease_lost\t0\t' .. what)
  count('rejected')
end

-- Extends one lease. Returns its end; or nil and why not. `lazy`: write only if little of the lease is left.
local function extend(id, token, fence, worker, lazy)
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
  ensure_known(job)
  record(job, 'extend', 'active', job.attempt, text[new], job.worker)
  write('HSET', job.key, 'lock_until_ms', text[new], 'updated_ms', NOW_S, 'tn',
    tn_field(job, 'active', text[new], job.worker))
  active_on[#active_on + 1], active_on[#active_on + 2] = text[new], id
  return new, nil, job, lease_ms
end

-- The last claim of each instance, packed in a field of the hash `claims`.
local CLAIMS = BASE .. ':claims'

-- { number, at, seed, ids } of a packed claim; nil if there is none, or another program wrote it.
local function claim_of(packed)
  if not packed then
    return nil
  end
  local is_packed, claim = pcall(cmsgpack.unpack, packed)
  if not is_packed or type(claim) ~= 'table' or type(claim.number) ~= 'number' or type(claim.at) ~= 'number'
    or type(claim.seed) ~= 'string' or type(claim.ids) ~= 'table' then
    return nil
  end
  for _, id in ipairs(claim.ids) do
    if type(id) ~= 'string' then
      return nil
    end
  end
  return claim
end
