-- Stores jobs, each once: an id that is known answers with the job that is there, or as a conflict when it
-- means another one. Due jobs join their lane, later ones wait in `delayed`.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] instance of the publisher
-- ARGV[3] 1 while an earlier call of the instance may be unanswered  ARGV[4] most unfinished jobs (0: no bound)
-- ARGV[5] how long an idempotency key holds, in ms
-- ARGV[6..] per job: id, payload, max_attempts, timeout_ms, backoff_ms, due_ms (absolute, 0: now), delay_ms, gid,
--   group_limit, task, hash of the payload, idempotency key ('' for none), hash of the request, requester,
--   trace, backoff kind ('' is fixed), most backoff_ms
-- Returns per job { 'created' | 'replayed' | 'conflict' | 'full', id, created_ms }
-- Clauses O-5 O-7 O-12 O-13 O-28 O-29 O-38
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include groups
-- @include recent
-- @include storing
local INSTANCE, UNANSWERED, DEPTH_MAX = ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
local WIDTH, FIRST = 17, 6
IDEM_MS = ARGV[5]
if UNANSWERED then
  recent = recent_of(INSTANCE)
end
local room = DEPTH_MAX > 0 and DEPTH_MAX - call('ZCARD', IDX .. 'wait') - call('ZCARD', ACTIVE) - call('ZCARD', DELAYED)

local answers = {}
for at = FIRST, #ARGV, WIDTH do
  local delay_ms = tonumber(ARGV[at + 6])
  local p = { id = ARGV[at], payload = ARGV[at + 1], max_attempts = ARGV[at + 2], timeout_ms = ARGV[at + 3],
    backoff_ms = ARGV[at + 4], due = delay_ms > 0 and NOW + delay_ms or tonumber(ARGV[at + 5]), gid = ARGV[at + 7],
    group_limit = ARGV[at + 8], task = ARGV[at + 9], payload_h = ARGV[at + 10], idem = ARGV[at + 11],
    request_h = ARGV[at + 12], requester = ARGV[at + 13], trace = ARGV[at + 14], backoff = ARGV[at + 15],
    backoff_ms_max = ARGV[at + 16] }
  local answer = known(p)
  if not answer and room and room <= 0 then
    answer = { 'full', p.id, 0 }
  end
  if not answer then
    answer = store(p)
    room = room and room - 1
  end
  answers[#answers + 1] = answer
end
remember(INSTANCE, table.concat(memory), UNANSWERED)
flush_stored()
return answers
