-- Cancels, retries and removes single jobs; the answers are OmniQ's.
-- @include head
-- @include job
-- @include outcome

-- Takes jobs out of the middle of lists without searching them from end to end. The index table knows when a job
-- entered its list, and the list is in that order. So the job's rank in the table, or else a binary search, gives its
-- approximate place. Jobs that were found are replaced by a mark, and one pass at the end removes all marks.
local MARK = '\0tenure:removed'
local marked = {}
local WINDOW = 64
local slow_left = 1 -- searches from end to end that are left in this call: they block the server

local function scan(list, from, to, id)
  from = math.max(0, from)
  for i, each in ipairs(call('LRANGE', list, text[from], text[to])) do
    if each == id then
      return from + i - 1
    end
  end
  return nil
end

-- Binary search: the first place whose job entered at `score` or later (or earlier, if the list is newest first).
local function search(list, length, idx, score, newest_first)
  local low, high = 0, length
  while low < high do
    local middle = math.floor((low + high) / 2)
    local other = call('LINDEX', list, text[middle])
    local at = tonumber(other and call('ZSCORE', idx, other)) or score
    local before = newest_first and at > score or (not newest_first and at < score)
    if before then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end

local last_place = {}

-- The place of the id in the list; nil if it is not there, false if finding out would block the server.
local function locate(list, id, idx, newest_first)
  local last = last_place[list] -- callers often name neighbours
  local beside = last and scan(list, last - 1, last + 1, id)
  if beside then
    return beside
  end
  local length = call('LLEN', list)
  if length <= 4 * WINDOW then
    return scan(list, 0, length, id)
  end
  local score = tonumber(call('ZSCORE', idx, id))
  if score then
    local rank = call(newest_first and 'ZREVRANK' or 'ZRANK', idx, id)
    local place = scan(list, rank - 2, rank + 2, id) or scan(list, rank - WINDOW, rank + WINDOW, id)
    if not place then
      local near = search(list, length, idx, score, newest_first)
      for from = near, near + 1023, 256 do -- jobs of the same millisecond are in any order
        place = place or scan(list, from, from + 255, id)
      end
    end
    place = place or scan(list, 0, WINDOW, id) -- jobs that were pushed to the front
    if place then
      return place
    end
  end
  if slow_left == 0 then
    return false
  end
  slow_left = slow_left - 1
  return call('LPOS', list, id) or nil
end

-- Marks the job's place in a list: true if it was there, nil if not, false for "call again".
local function mark(list, id, idx, newest_first)
  local place = locate(list, id, idx, newest_first)
  if not place then
    return place
  end
  call('LSET', list, text[place], MARK)
  last_place[list] = place
  local m = marked[list] or { n = 0, places = 0 }
  m.n, m.places = m.n + 1, m.places + place
  marked[list] = m
  return true
end

local function sweep_marks()
  for list, m in pairs(marked) do
    local from_end = m.places / m.n > call('LLEN', list) / 2
    call('LREM', list, text[from_end and -m.n or m.n], MARK)
  end
  marked = {}
end

-- Takes a job out of its lane: true, nil (it is not there) or false ("call again").
local function leave_lane(job)
  if job.state == 'delayed' then
    dirty.delayed = true
    return call('ZREM', DELAYED, job.id) == 1 or nil
  elseif job.state == 'failed' then
    return mark(FAILED, job.id, IDX .. 'failed', true)
  elseif job.state == 'completed' then
    return mark(COMPLETED, job.id, IDX .. 'completed', true)
  end
  local there = mark(lane_of(job.gid), job.id, IDX .. 'wait', false)
  if there and job.gid ~= '' then
    group_waiting = group_waiting - 1
    changed_groups[job.gid] = true
  end
  return there
end

-- Groups whose last waiting job was taken out are no longer ready.
local function tidy_groups()
  for gid in pairs(changed_groups) do
    if call('EXISTS', lane_of(gid)) == 0 then
      dirty.groups = true
      call('ZREM', READY, gid)
      if (tonumber(call('GET', GROUP .. gid .. ':inflight')) or 0) <= 0 then
        forget_group(gid)
      end
    end
  end
end

local steps = {}
local removed_keys = {}

function steps.cancel(job)
  if job.state == 'completed' or job.state == 'failed' then
    return 'FINISHED'
  end
  if job.state == 'active' then
    call('HSET', job.key, 'cancel', '1')
    return 'REQUESTED'
  end
  if leave_lane(job) == false then
    return 'AGAIN'
  end
  ensure_known(job)
  fail(job, { error = 'cancelled', error_json = '{"code":"cancelled","message":"cancelled"}',
    error_code = 'cancelled', worker = '-' }, 'cancel')
  return 'OK'
end

-- A failed job runs again from its first attempt.
function steps.retry(job)
  if job.state ~= 'failed' then
    return 'NOT_FAILED'
  end
  if leave_lane(job) == false then
    return 'AGAIN'
  end
  ensure_known(job)
  record(job, 'reopen', 'wait', 0, '0', '-')
  job.settled_token, job.settled_kind, job.settled_due = '-', '-', '0'
  call('HSET', job.key, 'state', 'wait', 'attempt', '0', 'due_ms', '', 'failed_ms', '', 'lease_token', '',
    'lock_until_ms', '', 'updated_ms', NOW_S, 'error', '', 'cancel', '0', 'tn',
    tn_field(job, 'wait', '0', '-'))
  join_lane(job.id, job.gid, false)
  move(job.id, 'failed', 'wait')
  append_event(job.id, 'wait', '{}')
  count('reopened')
  return 'OK'
end

local LANES = { wait = 'wait', gwait = 'wait', delayed = 'delayed', failed = 'failed', completed = 'completed' }

function steps.remove(job, lane)
  if job.state == 'active' then
    return 'ACTIVE'
  end
  if lane ~= '' then
    local grouped = job.gid ~= ''
    if LANES[lane] ~= job.state or (lane == 'wait' and grouped) or (lane == 'gwait' and not grouped) then
      return 'LANE_MISMATCH'
    end
  end
  local there = leave_lane(job)
  if there == false then
    return 'AGAIN'
  elseif not there and lane ~= '' then
    return 'NOT_IN_LANE'
  end
  ensure_known(job)
  record(job, 'remove', 'removed', job.attempt, '0', '-')
  removed_keys[#removed_keys + 1], removed_keys[#removed_keys + 2] = job.key, BASE .. ':events:' .. job.id
  call('DEL', job.key)
  move(job.id, job.state, nil)
  return 'OK'
end

local function steer(verb, id, lane)
  local job = read_job(id)
  return job and steps[verb](job, lane) or 'NO_JOB'
end

local function flush_steering()
  sweep_marks()
  tidy_groups()
  flush_groups()
  flush_finished()
  if #removed_keys > 0 then
    for from = 1, #removed_keys, MANY do
      call('DEL', unpack(removed_keys, from, math.min(from + MANY - 1, #removed_keys)))
    end
  end
  flush()
end

-- For the SDKs' batch scripts: ARGV[2] ids, at most 100, from ARGV[3] on. The answer is flat; per id it has id, 'OK' or
-- id, 'ERR', why.
local function steer_batch(verb, lane)
  local n = math.min(tonumber(ARGV[2]) or 0, #ARGV - 2)
  if n > 100 then
    return { 'ERR', 'BATCH_TOO_LARGE', '100' }
  end
  slow_left = n
  local flat = {}
  for at = 3, 2 + n do
    local id = ARGV[at]
    local answer = steer(verb, id, lane)
    flat[#flat + 1] = id
    if answer == 'OK' then
      flat[#flat + 1] = 'OK'
    else
      flat[#flat + 1], flat[#flat + 2] = 'ERR', answer
    end
  end
  flush_steering()
  return flat
end
