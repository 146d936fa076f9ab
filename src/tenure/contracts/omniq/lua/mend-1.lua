-- Repairs what OmniQ 1.x, a deleted job or a damaged lane left inconsistent: jobs that are in no lane, the index tables
-- that monitors read, the counts of groups. A call handles the given ids and reads no lane; `groups` reads the table of
-- leases.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] stray | idx | lane | groups  ARGV[3] the state, for idx and lane;
--   for groups the field `recount` of `upkeep` when the repair began, or ''
-- ARGV[4..] stray: per job its id, and state, attempt, updated_ms, lease_token and tn of its hash ('' for none), read
--   before its lane was read and did not have the id; idx: ids in the index table of the state; lane: ids in its lane;
--   groups: all gids
-- Returns the number of wrong entries
-- Clauses O-34 O-38 O-51
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
local STATE = ARGV[3]
local wrong = 0

local mend = {}

-- The hash field that says when the job entered the state.
local ENTERED = { wait = 'queued_ms', active = 'last_started_ms', delayed = 'updated_ms', failed = 'failed_ms',
  completed = 'completed_ms' }
local DUE = { active = 'lock_until_ms', delayed = 'due_ms' }

-- Whether the job is unchanged since the caller read these fields. Then no step has put it into a lane since.
local function is_as_before(at)
  local v = call('HMGET', JOB .. ARGV[at], 'state', 'attempt', 'updated_ms', 'lease_token', 'tn')
  for i = 1, 5 do
    if (v[i] or '') ~= ARGV[at + i] then
      return false
    end
  end
  return true
end

-- Puts jobs that are in no lane where their hashes say, at the end of the lane that is claimed or shown last. A lease
-- goes back into the table of leases with its old end. The new updated_ms keeps a second call from adding it again.
function mend.stray()
  for at = 4, #ARGV, 6 do
    local job = is_as_before(at) and read_job(ARGV[at])
    local state = job and job.state
    if job then
      call('ZADD', IDX .. state, 'NX', text[figure(call('HGET', job.key, ENTERED[state])) or NOW], job.id)
    end
    if state == 'active' then
      wrong = wrong + call('ZADD', ACTIVE, 'NX', text[figure(job.lock, NOW) or NOW], job.id)
    elseif state == 'delayed' then
      local due = figure(call('HGET', job.key, 'due_ms'), NOW) or NOW
      wrong = wrong + call('ZADD', DELAYED, 'NX', text[due], job.id)
    elseif state then
      call('RPUSH', state == 'wait' and lane_of(job.gid) or BASE .. ':' .. state, job.id)
      call('HSET', job.key, 'updated_ms', ARGV[at + 3] == NOW_S and text[NOW + 1] or NOW_S)
      wrong = wrong + 1
      needs_wake = needs_wake or state == 'wait'
      if state == 'wait' and job.gid ~= '' then
        changed_groups[job.gid] = true
      end
    end
  end
  flush_groups()
end

-- Removes jobs that are in another state, or that were deleted.
function mend.idx()
  call('ZCARD', IDX .. STATE) -- quarantines a key of another type
  for at = 4, #ARGV do
    if call('HGET', JOB .. ARGV[at], 'state') ~= STATE then
      wrong = wrong + call('ZREM', IDX .. STATE, ARGV[at])
    end
  end
end

local function lane_entry(id)
  local lane = BASE .. ':' .. STATE
  local v = call('HMGET', JOB .. id, 'state', ENTERED[STATE], 'updated_ms', DUE[STATE] or 'id')
  if v[1] ~= STATE then
    if STATE ~= 'wait' then -- from `wait` a claim drops it
      wrong = wrong + (DUE[STATE] and call('ZREM', lane, id) or call('LREM', lane, '0', id))
    end
    return
  end
  if not figure(call('ZSCORE', IDX .. STATE, id)) then
    call('ZADD', IDX .. STATE, text[figure(v[2]) or figure(v[3]) or NOW], id)
    wrong = wrong + 1
  end
  if DUE[STATE] and not figure(call('ZSCORE', lane, id), 0) then -- a job with an infinite score would never be due
    wrong = wrong + call('ZADD', lane, 'XX', 'CH', text[figure(v[4]) or NOW], id)
  end
end

function mend.lane()
  for at = 4, #ARGV do
    lane_entry(ARGV[at])
  end
end

-- Counts the leased jobs of each group, and the waiting jobs of all groups.
function mend.groups()
  local running, waiting, seen = {}, 0, {}
  for _, id in ipairs(call('ZRANGE', ACTIVE, '0', '-1')) do
    local gid = call('HGET', JOB .. id, 'gid')
    if gid and gid ~= '' then
      running[gid] = (running[gid] or 0) + 1
    end
  end
  local function recount(gid)
    if seen[gid] then
      return
    end
    seen[gid] = true
    local key, n = GROUP .. gid .. ':inflight', running[gid] or 0
    if (figure(call('GET', key), 0) or -1) ~= n then
      wrong = wrong + 1
      if n > 0 then
        call('SET', key, text[n])
      else
        call('DEL', key)
      end
    end
    waiting = waiting + call('LLEN', lane_of(gid))
    changed_groups[gid] = true
  end
  for at = 4, #ARGV do
    recount(ARGV[at])
  end
  for gid in pairs(running) do
    recount(gid)
  end
  for _, gid in ipairs(call('ZRANGE', READY, '0', '-1')) do -- groups created since the gids were read
    recount(gid)
  end
  call('HSET', STATS, 'group_waiting', text[waiting])
  flush_groups()
  if STATE ~= '' and call('HGET', BASE .. ':upkeep', 'recount') == STATE then
    call('HDEL', BASE .. ':upkeep', 'recount')
  end
end

mend[ARGV[2]]()
for _, name in ipairs({ 'wait', 'active', 'delayed', 'failed', 'completed', 'groups' }) do
  dirty[name] = true
end
flush()
return wrong
