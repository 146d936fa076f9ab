-- Resumes claims.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- Returns 1, or 0 if the queue was not paused
-- Clauses O-24 O-43
local GIVEN_NOW = '0'
-- @include head
local changed = call('DEL', BASE .. ':paused')
if changed == 1 then
  note('', 'resume', '0', '', '', '', '0', '0', '0', '0', '0', '', '0', '')
  needs_wake = true
end
flush()
return changed
