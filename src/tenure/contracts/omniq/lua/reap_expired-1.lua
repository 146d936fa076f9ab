-- Leases that ran out are taken back: their jobs wait out their backoff, or have failed.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms  ARGV[2] at most so many  ARGV[3] 1 (not of an SDK) to report leases without a job
-- Returns { 'OK', how many } and, if asked for, 1 when the groups must be counted anew, else 0
-- Clauses O-22 O-43
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
-- @include outcome
-- @include due
local reaped = reap(tonumber(ARGV[2]) or 1000, 0.5, false)
flush()
return { 'OK', reaped, ARGV[3] and orphans }
