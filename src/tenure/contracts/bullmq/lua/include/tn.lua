-- Our state of a job, as it stands in the field `tn` (see head.lua).
local LH = '^(%d+) (%S+) (%d+) (%d+) (%S+) (%d+)$'
local NEW_LH = '1 waiting 0 0 - 0'

-- Our state of a job: ver, state and lease end as our journal left them; zeros for a job not seen yet.
local function read_tn(words)
  if words == NEW_LH then
    return 1, 'waiting', '0', '0', '-', '0'
  elseif words then
    local ver, state, lease, fence, kind, due = match(words, LH)
    if ver and #ver < 16 and #lease < 16 then
      return tonumber(ver), state == 'running' and 'active' or state, lease, fence, kind, due
    end
  end
  return 0, '', '0', '0', '-', '0'
end
