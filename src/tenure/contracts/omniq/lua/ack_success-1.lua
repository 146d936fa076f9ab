-- Completes the job of one lease.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] id  ARGV[2] now_ms  ARGV[3] token
-- Returns { 'OK' } or { 'ERR', why }
-- Clauses O-43
local GIVEN_NOW = ARGV[2]
-- @include head
-- @include job
-- @include outcome
local verdict, why = ack(ARGV[1], ARGV[3], 'complete', '')
if why then
  return { 'ERR', why }
end
return { 'OK' }
