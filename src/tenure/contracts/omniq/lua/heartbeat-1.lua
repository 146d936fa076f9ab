-- Extends one lease to the job's timeout from now; the time that is left is not added.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] id  ARGV[2] now_ms  ARGV[3] token
-- Returns { 'OK', lock_until_ms } or { 'ERR', why }
-- Clauses O-43
local GIVEN_NOW = ARGV[2]
-- @include head
-- @include job
local new, why = extend(ARGV[1], ARGV[3], '', 'sdk', false)
flush()
if why then
  return { 'ERR', why }
end
return { 'OK', text[new] }
