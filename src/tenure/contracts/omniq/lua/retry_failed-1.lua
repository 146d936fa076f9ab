-- Sends one failed job back, with all its attempts.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] id  ARGV[2] now_ms
-- Returns { 'OK' } or { 'ERR', NO_JOB | NOT_FAILED }
-- Clauses O-25 O-43
local GIVEN_NOW = ARGV[2]
-- @include steer
local answer = steer('retry', ARGV[1], '')
flush_steering()
if answer == 'OK' then
  return { 'OK' }
end
return { 'ERR', answer }
