-- Takes one lease.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms
-- Returns { 'EMPTY' }, { 'PAUSED' } or { 'JOB', id, payload, lock_until_ms, attempt, max_attempts, gid, token }
-- Clauses O-43
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
local WORKER, SEED = 'sdk', ''
-- @include lease
if call('EXISTS', BASE .. ':paused') == 1 then
  return { 'PAUSED' }
end
take(1)
if #leases > 0 then
  times.last_reserve_ms = true
  count('started', 1)
end
flush()
local lease = leases[1]
if not lease then
  return { 'EMPTY' }
end
return { 'JOB', lease[1], lease[2], text[lease[3]], text[lease[4]], text[lease[5]], lease[6], lease[7] }
