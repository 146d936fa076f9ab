-- Cancel, send back, remove: one job at a time, in OmniQ's words for what went wrong.
-- @include head
-- @include groups
-- @include job
-- @include ending
-- @include removal
local steps = {}
local gone = {}

function steps.cancel(job)
  if job.state == 'completed' or job.state == 'failed' then
    return 'FINISHED'
  end
  if job.state == 'active' then
    call('HSET', job.key, 'cancel', '1')
    return 'REQUESTED'
  end
  if leave_line(job) == false then
    return 'AGAIN'
  end
  first_sight(job)
  fail(job, { error = 'cancelled', error_json = '{"code":"cancelled","message":"cancelled"}',
    error_code = 'cancelled', worker = '-' }, 'cancel')
  return 'OK'
end

-- A failed job runs again from its first attempt: a new epoch of the same job.
function steps.retry(job)
  if job.state ~= 'failed' then
    return 'NOT_FAILED'
  end
  if leave_line(job) == false then
    return 'AGAIN'
  end
  first_sight(job)
  record(job, 'reopen', 'wait', 0, '0', '-')
  job.settled_token, job.settled_kind, job.settled_due = '-', '-', '0'
  call('HSET', job.key, 'state', 'wait', 'attempt', '0', 'due_ms', '', 'failed_ms', '', 'lease_token', '',
    'lock_until_ms', '', 'updated_ms', NOW_S, 'error', '', 'cancel', '0', 'tn',
    words(job, 'wait', '0', '-'))
  join_lane(job.id, job.gid, false)
  move(job.id, 'failed', 'wait')
  tell(job.id, 'wait', '{}')
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
  local there = leave_line(job)
  if there == false then
    return 'AGAIN'
  elseif not there and lane ~= '' then
    return 'NOT_IN_LANE'
  end
  first_sight(job)
  record(job, 'remove', 'removed', job.attempt, '0', '-')
  gone[#gone + 1], gone[#gone + 2] = job.key, BASE .. ':events:' .. job.id
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
  if #gone > 0 then
    for from = 1, #gone, MANY do
      call('DEL', unpack(gone, from, math.min(from + MANY - 1, #gone)))
    end
  end
  flush()
end
