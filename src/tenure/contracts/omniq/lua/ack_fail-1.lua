-- Ends one lease: it failed, and the job's own options decide what then.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
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
