-- Removes jobs that are not running; they must be in the lane named.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] lane  ARGV[2] how many ids, at most 100  ARGV[3..] the ids, and after them now_ms if given
-- Returns per id, flat: id, 'OK' or id, 'ERR', why; or { 'ERR', 'BATCH_TOO_LARGE', '100' } or { 'ERR', 'BAD_LANE' }
-- Clauses O-26 O-43
local GIVEN_NOW = ARGV[3 + (tonumber(ARGV[2]) or 0)] or '0'
-- @include steer
if not LANES[ARGV[1]] then
  return { 'ERR', 'BAD_LANE' }
end
return steer_batch('remove', ARGV[1])
