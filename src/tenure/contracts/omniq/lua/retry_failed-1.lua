-- Sends one failed job back, with all its attempts.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] id  ARGV[2] now_ms
-- Returns { 'OK' } or { 'ERR', NO_JOB | NOT_FAILED }
-- Clauses O-25 O-43
local GIVEN_NOW = ARGV[2]
-- @include steer
local word = steer('retry', ARGV[1], '')
flush_steering()
if word == 'OK' then
  return { 'OK' }
end
return { 'ERR', word }
