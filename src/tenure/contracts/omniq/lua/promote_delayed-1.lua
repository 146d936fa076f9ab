-- Moves due jobs into their lanes.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms  ARGV[2] maximum number of jobs
-- Returns { 'OK', number of jobs }
-- Clauses O-21 O-43
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
-- @include outcome
-- @include due
local promoted = promote(tonumber(ARGV[2]) or 1000)
flush_groups()
flush()
return { 'OK', promoted }
