-- Pauses or resumes claims; running jobs continue.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] pause | resume
-- Returns 1 if that changed something
-- Clauses S-27
-- @include job
local changed = is_paused() ~= (ARGV[2] == 'pause') and 1 or 0
if changed == 1 then
  if ARGV[2] == 'pause' then
    call('SET', PAUSED, NOW_S)
  else
    call('DEL', PAUSED)
  end
  record_no_job('', ARGV[2], '', '')
  wake()
end
flush()
return changed
