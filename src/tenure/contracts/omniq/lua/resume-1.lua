-- Leases again.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- Returns how many flags were taken away: 1, or 0 when the queue was not paused
-- Clauses O-24 O-43
local GIVEN_NOW = '0'
-- @include head
local changed = call('DEL', BASE .. ':paused')
if changed == 1 then
  note('', 'resume', '0', '', '', '', '0', '0', '0', '0', '0', '', '0', '')
  wake_wanted = true
end
flush()
return changed
