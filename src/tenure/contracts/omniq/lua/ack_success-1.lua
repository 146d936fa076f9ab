-- Ends one lease: done.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
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
