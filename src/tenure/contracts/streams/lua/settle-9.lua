-- Ends leases, each with its own outcome. Hash, terminal event, acknowledgement and deletion of the entry are one
-- step. An outcome sent again after a lost answer gets the same verdict.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace
-- ARGV[2..] rows of three kinds:
--   'end', job_id, msg_id, fence, token, kind, task, body (result or error JSON), hash of the result,
--     error code, delay_ms
--   'like', lease fields as the claim returned them, task, ttl_s, time of the claim: what the following 'done' rows
--     have in common, up to the next 'like'
--   'done', result JSON, hash of the result, number of jobs, and for each job_id, msg_id: completions with one result
-- Returns the number of outcomes if the fast path accepted all of them. Otherwise per outcome 'complete',
--   { 'complete' | 'retry' | 'bury' | 'release' | 'cancel', due_ms } or { 'lost', reason }, and as a further element
--   quarantined records, if any: { job_id, reason, ... }
-- Clauses S-14 S-15 S-16 S-17 S-20 S-21 S-22
-- @include step
local byte, sub = string.byte, string.sub

-- Results up to this size are in the terminal event; followers read larger ones from the job.
local INLINE_MAX = 4096
-- With fewer entries it costs more to check whether the stream can be trimmed than to delete them.
local TRIM_FROM = 20

local acked = {}
local acked_n = 0

local function inline(name, body)
  if body == '' then
    return '{}'
  elseif #body > INLINE_MAX then
    return '{"' .. name .. '_bytes":' .. #body .. '}'
  end
  return '{"' .. name .. '":' .. body .. '}'
end

-- The general path for one outcome. A batch of completions does not need it, so its functions are defined when the
-- first other outcome is met. Without the fast path, which is `complete` below, throughput falls to 62 % and the CPU
-- time of Redis is 1.53 times as high (2026-11-17).
local function general_path()
  -- @include outcome
end
local settle_one

-- What the next 'done' rows have in common: lease fields before and after the end, and the journal line.
local lease_before, lease_after, ttl_s, task, until_ms, fence, token, line

-- The time to live to set again, or false. The claim has set it. The contract counts it in seconds, so within half a
-- second setting it again would not be visible, and would be two of five commands.
local function ttl_to_refresh(value, claimed_ms, lease_until)
  local seconds = tonumber(value)
  if not seconds or (seconds >= 500 and NOW - tonumber(claimed_ms) < 500
      and claimed_ms + seconds * 1000 >= lease_until + RUNNING_MS) then
    return false
  end
  return value
end

local function begin_like(at)
  lease_before, task = ARGV[at + 1], ARGV[at + 2]
  local ver, attempt, max_attempts, lost
  fence, ver, attempt, max_attempts, lost, until_ms, token =
    match(lease_before, '^(%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+)$')
  ttl_s = ttl_to_refresh(ARGV[at + 3], ARGV[at + 4], until_ms)
  ver = format('%d', ver + 1)
  lease_after = fence .. ' ' .. ver .. ' ' .. attempt .. ' ' .. max_attempts .. ' ' .. lost .. ' 0 ' .. token
  line = '\tcomplete\t' .. ver .. '\t' .. NOW_S .. '\t' .. task .. '\trunning\tdone\t' .. attempt
    .. '\t' .. fence .. '\t' .. fence .. '\t0\t' .. until_ms .. '\t' .. token .. '\t' .. max_attempts .. '\t'
  -- A job that lost its lease before may be its worker's suspect: 0 sends it to the general path (S-13).
  until_ms = lost == '0' and tonumber(until_ms) or 0
end

local outcomes_n = 0
local fast_n = 0 -- outcomes of the fast path
local verdicts = {} -- of the general path, by the number of the outcome

local function settle_in_full(...)
  settle_one = settle_one or general_path()
  verdicts[outcomes_n] = settle_one(...)
end

-- A 'done' row, by the fast path; returns where the next row begins. If the lease has not expired and the job's lease
-- fields are those that the claim returned, no other program has changed the job, and nothing needs to be parsed.
local function complete(at)
  local body, result_h = ARGV[at + 1], ARGV[at + 2]
  local data, tail = inline('result', body), line .. result_h
  local is_alive = until_ms > NOW
  local next_at = at + 4 + 2 * ARGV[at + 3]
  for i = at + 4, next_at - 1, 2 do
    local id, msg_id = ARGV[i], ARGV[i + 1]
    local key = JOB .. id
    local v = pcall('HMGET', key, 'status', 'lease')
    outcomes_n = outcomes_n + 1
    if is_alive and v[2] == lease_before and v[1] == 'running' then
      call('HSET', key, 'status', 'done', 'updated_ts', NOW_S, 'lease', lease_after, 'result', body)
      emit(key, 'done', 'worker.done', data, ttl_s)
      add_line(id, tail)
      acked_n = acked_n + 1
      acked[acked_n] = msg_id
      fast_n = fast_n + 1
    else
      settle_in_full(id, msg_id, tonumber(fence), token, 'complete', task, body, result_h, '', 0)
    end
  end
  return next_at
end

local at = 2
while ARGV[at] do
  local row = ARGV[at]
  if row == 'like' then
    begin_like(at)
    at = at + 5
  elseif row == 'done' then
    at = complete(at)
  else
    outcomes_n = outcomes_n + 1
    settle_in_full(ARGV[at + 1], ARGV[at + 2], tonumber(ARGV[at + 3]), ARGV[at + 4], ARGV[at + 5],
      ARGV[at + 6], ARGV[at + 7], ARGV[at + 8], ARGV[at + 9], tonumber(ARGV[at + 10]))
    at = at + 11
  end
end
if fast_n > 0 then
  own('HINCRBY', STATS, 'done', format('%d', fast_n))
end

-- Whether entry `a` is older than `b`; false also for ids that are not thirteen digits, "-" and a number.
local function older(a, b)
  if byte(a, 14) ~= 45 or byte(b, 14) ~= 45 then
    return false
  elseif #a == #b then
    return a < b
  end
  local a_ms, b_ms = sub(a, 1, 13), sub(b, 1, 13)
  return a_ms < b_ms or (a_ms == b_ms and #a < #b)
end

-- To delete an entry, Redis searches its block from the front, which costs more than settling a job's hash. If these
-- entries are the oldest of the stream, in order, and no entry up to the last of them is pending (a group delivers in
-- order), the stream is trimmed up to the last of them instead. Without this throughput falls to 81 % (2026-11-18).
local function trim(acknowledged)
  local last = acked[1]
  for i = 2, acked_n do
    local a = last
    last = acked[i]
    if not (#a == #last and a < last) and not older(a, last) then
      return false
    end
  end
  if byte(last, 14) ~= 45 or acknowledged < acked_n then
    return false
  end
  local first = call('XRANGE', STREAM, '-', '+', 'COUNT', '1')[1]
  if not first or first[1] ~= acked[1] then
    return false
  end
  local pending = call('XPENDING', STREAM, GROUP)
  if pending[1] > 0 and not older(last, pending[2]) then
    return false
  end
  local ms, seq = match(last, '^(%d+)%-(%d+)$')
  return #seq < 15 and call('XTRIM', STREAM, 'MINID', ms .. '-' .. format('%d', seq + 1)) >= acked_n
end

local acknowledged = 0
for from = 1, acked_n, 1000 do -- unpack has a limit
  local count = pcall('XACK', STREAM, GROUP, unpack(acked, from, math.min(from + 999, acked_n)))
  acknowledged = acknowledged + (tonumber(count) or 0)
end
if acked_n < TRIM_FROM or not trim(acknowledged) then
  for from = 1, acked_n, 1000 do
    pcall('XDEL', STREAM, unpack(acked, from, math.min(from + 999, acked_n)))
  end
end
flush()
if fast_n == outcomes_n and #quarantined == 0 then
  return outcomes_n
end
for i = 1, outcomes_n do
  verdicts[i] = verdicts[i] or 'complete'
end
verdicts[outcomes_n + 1] = #quarantined > 0 and quarantined or nil
return verdicts
