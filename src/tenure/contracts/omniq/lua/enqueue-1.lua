-- Stores one job.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] id  ARGV[2] payload  ARGV[3] max_attempts  ARGV[4] timeout_ms  ARGV[5] backoff_ms  ARGV[6] now_ms
-- ARGV[7] due_ms  ARGV[8] gid  ARGV[9] group_limit
-- Returns { 'OK', id } or { 'ERR', 'CONFLICT' } when the id is another job's
-- Clauses O-43
local GIVEN_NOW = ARGV[6]
-- @include head
-- @include job
-- @include store
local ID, PAYLOAD, GID = ARGV[1], ARGV[2], ARGV[8] or ''
local s = shape_of({ max_attempts = ARGV[3], timeout_ms = ARGV[4], backoff_ms = ARGV[5], due = tonumber(ARGV[7]) or 0,
  group_limit = ARGV[9] or '0', task = '', requester = '', backoff = '', backoff_ms_max = '' }, 1)
local answer = known(s, ID, PAYLOAD, GID) or store(s, ID, PAYLOAD, '', GID, '')
flush_stored()
if answer and answer[1] == 'conflict' then
  return { 'ERR', 'CONFLICT' }
end
return { 'OK', ID }
