-- Changes when a delayed job is due, or the priority of a job that has not ended.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] delay, priority or data  ARGV[3] the delay from now in ms, the priority, or the data JSON
-- ARGV[4] 1 to stand before its equals  ARGV[5..] ids
-- Returns per id 'ok', 'missing', or the state that forbids it
-- Clauses B-49 B-50 B-56
-- @include queue
-- @include waiting
-- @include place
prove()
local VALUE, TO_FRONT = tonumber(ARGV[3]), ARGV[4] == '1'

local function change_delay(job)
  if job.state ~= 'delayed' then
    return job.state
  end
  local due = NOW + VALUE
  call('HSET', job.key, 'delay', ARGV[3])
  delay(job.id, due)
  note_move(job, 'promote', 'delayed', text[due])
  return 'ok'
end

-- The options stay as they were given; the field is what everybody reads. A job that waits moves at
-- once, every other one when it next waits.
local function change_priority(job)
  if job.state == 'completed' or job.state == 'failed' then
    return job.state
  end
  call('HSET', job.key, 'priority', ARGV[3])
  if job.state == 'waiting' or job.state == 'prioritized' then
    OUT[job.state](job.id)
    job.priority = ARGV[3]
    note_move(job, 'promote', (TO_FRONT and wait_at_front or wait_at_end)(job.id, VALUE))
  end
  return 'ok'
end

local function change_data(job)
  call('HSET', job.key, 'data', ARGV[3])
  return 'ok'
end

local change = ({ delay = change_delay, priority = change_priority, data = change_data })[ARGV[2]]
local answers = {}
for i = 5, #ARGV do
  local job = read_job(ARGV[i])
  answers[#answers + 1] = job and change(job) or 'missing'
end
flush()
return answers
