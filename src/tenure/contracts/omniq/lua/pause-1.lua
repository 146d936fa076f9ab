-- No more leases: a flag, and nothing moves.
-- One of the fifteen scripts of an OmniQ SDK, by its name, arguments and replies.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- Returns 'OK'
-- Clauses O-23 O-43
local GIVEN_NOW = '0'
-- @include head
if call('SETNX', BASE .. ':paused', '1') == 1 then
  note('', 'pause', '0', '', '', '', '0', '0', '0', '0', '0', '', '0', '')
  wake_wanted = true
end
flush()
return 'OK'
