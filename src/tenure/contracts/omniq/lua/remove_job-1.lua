-- Removes one job that is not running; it must be in the lane named.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] id  ARGV[2] lane
-- Returns { 'OK' } or { 'ERR', NO_JOB | ACTIVE | LANE_MISMATCH | NOT_IN_LANE | BAD_LANE }
-- Clauses O-26 O-43
local GIVEN_NOW = '0'
-- @include steer
local answer = LANES[ARGV[2]] and steer('remove', ARGV[1], ARGV[2]) or 'BAD_LANE'
flush_steering()
if answer == 'OK' then
  return { 'OK' }
end
return { 'ERR', answer }
