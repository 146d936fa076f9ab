-- A job as operators see it: its state, its hash, and how it leaves its list or set.

local function state_of(id)
  if call('ZSCORE', COMPLETED, id) then return 'completed' end
  if call('ZSCORE', FAILED, id) then return 'failed' end
  if call('ZSCORE', DELAYED, id) then return 'delayed' end
  if call('ZSCORE', PRIORITIZED, id) then return 'prioritized' end
  if call('ZSCORE', CHILDREN, id) then return 'waiting-children' end
  if call('LPOS', ACTIVE, id) then return 'active' end
  if call('LPOS', WAIT, id) then return 'waiting' end
  if call('LPOS', PAUSED, id) then return 'paused' end
  return 'unknown'
end

local function read_job(id)
  local key = PREFIX .. id
  local v = redis.pcall('HMGET', key, 'name', 'atm', 'stc', 'ats', 'tn', 'priority', 'parentKey', 'parent',
    'deid', 'opts', 'rjk')
  if not v[1] then
    return nil
  end
  local ver, journalled, lease, settled = read_tn(v[5])
  return { id = id, key = key, name = plain(v[1]), atm = whole(v[2]) or 0, stc = whole(v[3]) or 0,
    fence = whole(v[4]) and v[4] or '0', ver = ver, journalled = journalled, lease = lease,
    priority = whole(v[6]) and v[6] or '0',
    parent_key = v[7], parent = v[8], deid = v[9], opts = v[10], rjk = v[11], state = state_of(id),
    settled = settled }
end

local LEAVE = {
  waiting = function(id) call('LREM', WAIT, '1', id) end,
  paused = function(id) call('LREM', PAUSED, '1', id) end,
  prioritized = function(id) call('ZREM', PRIORITIZED, id) end,
  delayed = function(id) call('ZREM', DELAYED, id) end,
  completed = function(id) call('ZREM', COMPLETED, id) end,
  failed = function(id) call('ZREM', FAILED, id) end,
  ['waiting-children'] = function(id) call('ZREM', CHILDREN, id) end,
  unknown = function() end,
}

-- The parent of a finished child that runs again waits for it again, as in BullMQ 6.
local function rejoin_parent(job)
  if job.parent_key and call('EXISTS', job.parent_key) == 1 then
    -- A key of another type has no children.
    if redis.pcall('ZREM', job.parent_key .. ':unsuccessful', job.key) == 1
      or redis.pcall('HDEL', job.parent_key .. ':failed', job.key) == 1
      or redis.pcall('HDEL', job.parent_key .. ':processed', job.key) == 1 then
      redis.pcall('SADD', job.parent_key .. ':dependencies', job.key)
    end
  end
end

-- Notes the step if the journal has the job's earlier history. The history of a job of Node's begins with our first
-- claim.
local function note_move(job, kind, to, due)
  if job.ver == 0 then
    return
  end
  local ver = text[job.ver + 1]
  call('HSET', job.key, 'tn', ver .. ' ' .. to .. ' 0 ' .. job.settled)
  local from = job.journalled == 'delayed' and 'delayed' or job.state
  note({ id = job.id, kind = kind, ver = ver, task = job.name, from = from, to = to,
    attempt = text[job.atm + job.stc], fence = job.fence, due = due, priority = job.priority })
end
