-- Takes back expired leases. Their jobs wait for their backoff, or fail after the last attempt.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms  ARGV[2] maximum number of leases  ARGV[3] 1 to report leases without a job (SDKs do not send it)
-- Returns { 'OK', number of leases } and, with ARGV[3], 1 if the groups must be counted anew, else 0
-- Clauses O-22 O-43
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
-- @include outcome
-- @include due
local reaped = reap(tonumber(ARGV[2]) or 1000, 0.5, false)
flush()
return { 'OK', reaped, ARGV[3] and orphans }
