-- Grants leases. Grouped and ungrouped jobs take turns. Groups give one job each, in the order in which they became
-- ready, and never exceed their limit. The including script sets SEED and WORKER first.
-- @include utf8
local leases, granted_ids = {}, {}
local DEFAULT_LEASE_MS = 60000
local dropped, DROPS_MAX = 0, 1000 -- a claim stops after this many entries that are not waiting jobs
local seq_at, seq_end = 0, 0

-- A token is unique because of OmniQ's own sequence, and secret because of the claimer's random prefix.
local function next_token(id, limit)
  if seq_at >= seq_end then
    seq_end = call('INCRBY', BASE .. ':lease:seq', text[limit])
    seq_at = seq_end - limit
  end
  seq_at = seq_at + 1
  if SEED == '' then
    return redis.sha1hex(id .. ':' .. NOW_S .. ':' .. text[seq_at])
  end
  return SEED .. '.' .. text[seq_at]
end

-- Drops a lane's entry that is not a waiting job: the job was deleted, was in the lane twice, or cannot be read.
local function drop(id, state, flaw)
  dropped = dropped + 1
  dirty.wait = true
  if STATES[state] and not flaw then
    return false
  end
  quarantine(JOB .. id, flaw or 'the state ' .. string.sub(state or '', 1, 40) .. ' is not a state of a job')
  move(id, 'wait', nil)
  add_line(plain(string.sub(id, 1, 512)), '\texpire\t0\t' .. NOW_S .. '\t')
  return false
end

-- Leases one job that was taken from the lane of a group ('': none). False if it cannot be leased. That includes a job
-- of another group: its end would free a slot of that other group.
local function grant(id, limit, lane_gid)
  local key = JOB .. id
  local v = call('HMGET', key, 'state', 'tn', 'payload', 'attempt', 'max_attempts', 'timeout_ms', 'gid', 'task',
    'created_ms', 'first_started_ms', 'trace')
  if v[1] ~= 'wait' then
    return drop(id, v[1])
  end
  local attempt, most, lease_ms, created = figure(v[4], 0), figure(v[5], 1), figure(v[6], 0), figure(v[9], 0)
  local gid = v[7] or ''
  if not (attempt and most and lease_ms and created) then
    return drop(id, v[1], 'attempt, max_attempts, timeout_ms or created_ms is not a number')
  elseif not v[3] then
    return drop(id, v[1], 'it has no payload')
  elseif #id == 0 or #id > 2048 or (find(id, '[\128-\255]') and not is_utf8(id)) then
    return drop(id, v[1], 'its id is not UTF-8 of 1 to 2048 bytes')
  elseif gid ~= lane_gid then
    return drop(id, v[1])
  end
  attempt = attempt + 1
  lease_ms = lease_ms > 0 and lease_ms or DEFAULT_LEASE_MS
  local lock, token, task = text[NOW + lease_ms], next_token(id, limit), plain(v[8])
  local max_attempts = most >= 1 and text[most] or '1'
  local fence, tn = 1, nil
  -- Most jobs are claimed once, and then nothing needs to be parsed. Without this throughput falls to 78 %.
  if v[2] == NEW_TN then
    tn = '2 1 active ' .. lock .. ' ' .. WORKER .. ' - - 0'
    add_line(plain(id), '\tclaim\t2\t' .. NOW_S .. '\t' .. task .. '\twait\tactive\t' .. text[attempt] .. '\t1\t0\t'
      .. lock .. '\t0\t' .. WORKER .. '\t' .. max_attempts .. '\t' .. plain(gid))
  else
    local job = read_job(id)
    ensure_known(job)
    fence = job.fence + 1
    job.ver, job.fence = job.ver + 1, fence
    tn = tn_field(job, 'active', lock, WORKER)
    note(id, 'claim', text[job.ver], task, state_left(job), 'active', text[attempt], text[fence], text[fence - 1], lock,
      '0', WORKER, max_attempts, gid)
  end
  if v[10] and v[10] ~= '' then
    write('HSET', key, 'state', 'active', 'attempt', text[attempt], 'lock_until_ms', lock, 'lease_token', token,
      'last_started_ms', NOW_S, 'updated_ms', NOW_S, 'tn', tn)
  else
    write('HSET', key, 'state', 'active', 'attempt', text[attempt], 'lock_until_ms', lock, 'lease_token', token,
      'first_started_ms', NOW_S, 'last_started_ms', NOW_S, 'updated_ms', NOW_S, 'tn', tn)
  end
  local n = #active_on
  active_on[n + 1], active_on[n + 2] = lock, id
  move(id, 'wait', 'active')
  leases[#leases + 1] = { id, v[3], tonumber(lock), attempt, tonumber(max_attempts), gid, token, fence, task, created,
    v[11] or '', lease_ms }
  granted_ids[#granted_ids + 1] = id
  return true
end

-- Up to `limit` from the ungrouped lane.
local function take_ungrouped(limit)
  local taken = 0
  while taken < limit and dropped < DROPS_MAX do
    local ids = call('LPOP', WAIT, text[limit - taken])
    if not ids then
      break
    end
    for _, id in ipairs(ids) do
      if grant(id, limit, '') then
        taken = taken + 1
      end
    end
  end
  return taken
end

-- One job of a group's list that can be leased; false when there is none.
local function take_first(list, limit, gid)
  local id = call('LPOP', list)
  while id do
    group_waiting = group_waiting - 1
    if grant(id, limit, gid) then
      return true
    end
    id = dropped < DROPS_MAX and call('LPOP', list)
  end
  return false
end

-- Takes one job of each group in `popped`; returns how many were granted. One command reads all counts and limits, and
-- one writes all counts. A group at its limit becomes ready again when a slot is free.
local function take_round(popped, limit)
  local keys, set, again, taken = {}, {}, {}, 0
  for i = 1, #popped, 2 do
    keys[i], keys[i + 1] = GROUP .. popped[i] .. ':limit', GROUP .. popped[i] .. ':inflight'
  end
  local counts = call('MGET', unpack(keys))
  for i = 1, #popped, 2 do
    local slots, inflight = figure(counts[i], 1) or 1, math.max(0, figure(counts[i + 1], 0) or 0)
    slots = slots > 0 and slots or 1
    local list = GROUP .. popped[i] .. ':wait'
    if inflight < slots then
      if take_first(list, limit, popped[i]) then
        taken, inflight = taken + 1, inflight + 1
        set[#set + 1], set[#set + 2] = keys[i + 1], text[inflight]
      end
      if inflight < slots and call('EXISTS', list) == 1 then
        again[#again + 1], again[#again + 2] = NOW_S, popped[i]
      end
    end
  end
  if #set > 0 then
    call('MSET', unpack(set))
  end
  each_many('ZADD', READY, again)
  return taken
end

-- Up to `limit` from the groups, one of each in turn, so that a long group does not starve the others.
local function take_grouped(limit)
  local taken = 0
  while taken < limit and dropped < DROPS_MAX do
    local popped = call('ZPOPMIN', READY, text[limit - taken])
    if #popped == 0 then
      break
    end
    dirty.groups = true
    taken = taken + take_round(popped, limit)
  end
  return taken
end

-- Up to `limit` from both lanes: if both have work, each gets half. Every grant changes whose turn it is.
local function take(limit)
  local rr = BASE .. ':lane:rr'
  local turn = call('GET', rr) == '1' and 1 or 0
  local taken = 0
  if call('EXISTS', READY) == 1 then
    local half = turn == 0 and math.ceil(limit / 2) or math.floor(limit / 2)
    taken = take_grouped(half)
    taken = taken + take_ungrouped(limit - taken)
    taken = taken + take_grouped(limit - taken)
  else
    taken = take_ungrouped(limit)
  end
  if taken % 2 == 1 then
    call('SET', rr, text[1 - turn])
  end
  return taken
end
