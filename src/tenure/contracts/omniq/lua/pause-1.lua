-- Pauses claims by a flag; no job moves.
-- One of the fifteen scripts of OmniQ's SDKs, with their name, arguments and replies.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- Returns 'OK'
-- Clauses O-23 O-43
local GIVEN_NOW = '0'
-- @include head
if call('SETNX', BASE .. ':paused', '1') == 1 then
  note('', 'pause', '0', '', '', '', '0', '0', '0', '0', '0', '', '0', '')
  needs_wake = true
end
flush()
return 'OK'
