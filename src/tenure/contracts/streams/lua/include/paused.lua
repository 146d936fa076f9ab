-- Whether the queue hands out no leases.
-- A pause is the time at which it began. Anything else in its key is not one.
local function is_paused()
  local since = own('GET', PAUSED)
  if since and not string.find(since, '^%d+$') then
    quarantine().replace(PAUSED, 'not a time')
    return false
  end
  return since ~= false
end
