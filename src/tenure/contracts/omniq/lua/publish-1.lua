-- Stores jobs, each once. A known id is answered with the existing job, or with 'conflict' if that is a different one.
-- Due jobs are added to their lane, others to `delayed`.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] instance of the publisher
-- ARGV[3] 0, 1 if other calls of the instance are under way, 2 if the answer to an earlier one may be lost
-- ARGV[4] maximum number of unfinished jobs (0: none)  ARGV[5] lifetime of an idempotency key in ms
-- ARGV[6..] runs of jobs with the same options. For each run: number of jobs, number of arguments per job (3, 4 or 7),
--   max_attempts, timeout_ms, backoff_ms, due_ms (absolute, 0: now), delay_ms, group_limit, task, requester, backoff
--   kind ('': fixed), maximum backoff_ms. Then per job: id, payload, hash of the payload; with 4 or 7 arguments gid;
--   with 7 trace, idempotency key ('': none), hash of the request
-- Returns now_ms and, for each job that this call did not create, { its number (from 1),
--   'replayed' | 'conflict' | 'full', id, created_ms or 0 }
-- Clauses O-5 O-7 O-12 O-13 O-28 O-29 O-38
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
-- @include recent
-- @include store
local INSTANCE, UNANSWERED, DEPTH_MAX, IDEM_MS = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local HEAD, FIRST = 12, 6
local was_published = UNANSWERED == 2 and published_by(INSTANCE) or nil
local room = DEPTH_MAX > 0 and DEPTH_MAX - call('ZCARD', IDX .. 'wait') - call('ZCARD', ACTIVE) - call('ZCARD', DELAYED)

-- The answer for a job that must not be stored; nil for one that may be stored if its id is new.
local function refused(s, id, payload, payload_h, gid, idem, request_h)
  local answer = idem ~= '' and used(idem, request_h)
  if answer then
    return answer
  end
  if s.copies and not was_published and (not room or room > 0) then
    return nil -- COPY fails if the id is known
  end
  answer = known(s, id, payload, gid)
  if answer then
    return answer
  end
  -- A call whose answer was lost may have stored it, and it may have run and been trimmed since.
  if was_published and was_published(id, payload_h) then
    return { 'replayed', id, 0 }
  end
  return room and room <= 0 and { 'full', id, 0 } or nil
end

local answers, position, at = { NOW }, 0, FIRST
while ARGV[at] do
  local rows, width = tonumber(ARGV[at]), tonumber(ARGV[at + 1])
  local delay_ms = tonumber(ARGV[at + 6])
  local s = shape_of({ max_attempts = ARGV[at + 2], timeout_ms = ARGV[at + 3], backoff_ms = ARGV[at + 4],
    due = delay_ms > 0 and NOW + delay_ms or tonumber(ARGV[at + 5]), group_limit = ARGV[at + 7],
    task = ARGV[at + 8], requester = ARGV[at + 9], backoff = ARGV[at + 10], backoff_ms_max = ARGV[at + 11] }, rows)
  at = at + HEAD
  local gid, trace, idem, request_h = '', '', '', ''
  for row = at, at + (rows - 1) * width, width do
    local id, payload, payload_h = ARGV[row], ARGV[row + 1], ARGV[row + 2]
    if width > 3 then
      gid = ARGV[row + 3]
    end
    if width > 4 then
      trace, idem, request_h = ARGV[row + 4], ARGV[row + 5], ARGV[row + 6]
    end
    position = position + 1
    local answer = refused(s, id, payload, payload_h, gid, idem, request_h)
      or store(s, id, payload, payload_h, gid, trace)
    if answer then
      answers[#answers + 1] = { position, answer[1], answer[2], answer[3] }
    else
      if idem ~= '' then
        call('SET', BASE .. ':idem:' .. idem, request_h .. ' ' .. id, 'PX', IDEM_MS)
      end
      room = room and room - 1
    end
  end
  at = at + rows * width
end
remember(INSTANCE, table.concat(memory), UNANSWERED > 0)
flush_stored()
return answers
