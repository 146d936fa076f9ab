-- Puts right what clients without counters (OmniQ 1.x), a deleted job or a damaged lane have left wrong: jobs
-- that no lane has, the tables that monitors read, the counts of groups; a bounded piece at a time.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] stray | idx | lane | groups  ARGV[3] the state, for idx and lane;
--   for groups the field `recount` of `upkeep` as it was when mending began, or ''
-- ARGV[4..] stray: ids of jobs that were seen in no lane; idx: ids that the mirror table of the state has;
--   lane: ids that stand in its lane; groups: all gids
-- Returns how many entries were wrong
-- Clauses O-34 O-38 O-51
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include groups
-- @include job
local STATE = ARGV[3]
local wrong = 0

local mend = {}

-- When the job entered the state, as far as its hash tells.
local ENTERED = { wait = 'queued_ms', active = 'last_started_ms', delayed = 'updated_ms', failed = 'failed_ms',
  completed = 'completed_ms' }
local DUE = { active = 'lock_until_ms', delayed = 'due_ms' }

-- Takes out of `ids` those that stand in the list.
local function strike_out(list, ids)
  for from = 0, call('LLEN', list) - 1, 1000 do
    for _, id in ipairs(call('LRANGE', list, text[from], text[from + 999])) do
      ids[id] = nil
    end
  end
end

-- The hash says where a job stands. One that no lane has goes there, at the end that is reached last; a lease
-- goes back into its table and ends when it would have ended.
function mend.stray()
  local lost, order = {}, {}
  for at = 4, #ARGV do
    local job = read_job(ARGV[at])
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
      local list = state == 'wait' and lane_of(job.gid) or BASE .. ':' .. state
      lost[list] = lost[list] or {}
      lost[list][job.id] = true
      order[#order + 1] = { list, job }
    end
  end
  for list, ids in pairs(lost) do
    strike_out(list, ids)
  end
  for _, each in ipairs(order) do
    local list, job = each[1], each[2]
    if lost[list][job.id] then
      lost[list][job.id] = nil
      call('RPUSH', list, job.id)
      wrong = wrong + 1
      wake_wanted = wake_wanted or job.state == 'wait'
      if job.state == 'wait' and job.gid ~= '' then
        looked_at[job.gid] = true
      end
    end
  end
  flush_groups()
end

-- A job that says it is elsewhere has left; one that is gone, too.
function mend.idx()
  call('ZCARD', IDX .. STATE) -- sets a table of another type aside
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
    if STATE ~= 'wait' then -- a claim drops it there
      wrong = wrong + (DUE[STATE] and call('ZREM', lane, id) or call('LREM', lane, '1', id))
    end
    return
  end
  if not figure(call('ZSCORE', IDX .. STATE, id)) then
    call('ZADD', IDX .. STATE, text[figure(v[2]) or figure(v[3]) or NOW], id)
    wrong = wrong + 1
  end
  if DUE[STATE] and not figure(call('ZSCORE', lane, id), 0) then -- an endless time would never come
    wrong = wrong + call('ZADD', lane, 'XX', 'CH', text[figure(v[4]) or NOW], id)
  end
end

function mend.lane()
  for at = 4, #ARGV do
    lane_entry(ARGV[at])
  end
end

-- How many jobs of each group are leased, and how many wait in all.
function mend.groups()
  local running, waiting, seen = {}, 0, {}
  for _, id in ipairs(call('ZRANGE', ACTIVE, '0', '-1')) do
    local gid = call('HGET', JOB .. id, 'gid')
    if gid and gid ~= '' then
      running[gid] = (running[gid] or 0) + 1
    end
  end
  local function look(gid)
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
    looked_at[gid] = true
  end
  for at = 4, #ARGV do
    look(ARGV[at])
  end
  for gid in pairs(running) do
    look(gid)
  end
  for _, gid in ipairs(call('ZRANGE', READY, '0', '-1')) do -- made since the gids were collected
    look(gid)
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
