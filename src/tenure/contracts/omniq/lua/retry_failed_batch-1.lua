-- Sends failed jobs back, with all their attempts.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms  ARGV[2] how many ids, at most 100  ARGV[3..] the ids
-- Returns per id, flat: id, 'OK' or id, 'ERR', why; or { 'ERR', 'BATCH_TOO_LARGE', '100' }
-- Clauses O-25 O-43
local GIVEN_NOW = ARGV[1]
-- @include steer
return steer_batch('retry', '')
