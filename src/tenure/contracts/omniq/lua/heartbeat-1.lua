-- Keeps one lease: for the job's whole timeout from now, and not stacked on what is left.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] id  ARGV[2] now_ms  ARGV[3] token
-- Returns { 'OK', lock_until_ms } or { 'ERR', why }
-- Clauses O-43
local GIVEN_NOW = ARGV[2]
-- @include head
-- @include job
local new, why = keep(ARGV[1], ARGV[3], '', 'sdk', false)
flush()
if why then
  return { 'ERR', why }
end
return { 'OK', text[new] }
