-- Fails one attempt; the job's own options decide whether it is tried again.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] id  ARGV[2] now_ms  ARGV[3] token  ARGV[4] error (may be missing)
-- Returns { 'RETRY', due_ms }, { 'FAILED' } or { 'ERR', why }
-- Clauses O-43
local GIVEN_NOW = ARGV[2]
-- @include head
-- @include job
-- @include outcome
local verdict, why = ack(ARGV[1], ARGV[3], 'fail', ARGV[4] or '')
if why then
  return { 'ERR', why }
elseif verdict[1] == 'retry' then
  return { 'RETRY', text[verdict[2]] }
end
return { 'FAILED' }
