-- Due jobs join their lanes.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms  ARGV[2] at most so many
-- Returns { 'OK', how many }
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
