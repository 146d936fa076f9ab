-- Stops or restarts the handing out of leases: a flag, and nothing moves.
-- KEYS[1] {queue}:meta, the anchor: every other key is named after it and shares its slot
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] pause | resume
-- Returns how many flags that changed: 1, or 0 when it was so already
-- Clauses O-4 O-23 O-24
local GIVEN_NOW = ARGV[1]
-- @include head
local changed
if ARGV[2] == 'pause' then
  changed = call('SETNX', BASE .. ':paused', '1')
else
  changed = call('DEL', BASE .. ':paused')
end
if changed == 1 then
  note('', ARGV[2], '0', '', '', '', '0', '0', '0', '0', '0', '', '0', '')
  wake_wanted = true
end
flush()
return changed
