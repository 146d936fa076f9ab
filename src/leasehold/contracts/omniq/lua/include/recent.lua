-- What one client's unanswered calls have done, so that a call sent again after a lost answer is recognised
-- even when the job has run and gone in the meantime. A client whose calls are all answered leaves one
-- call's worth, and that for ten minutes.
local RECENT_BYTES_MAX = 1000000

local function recent_key(instance)
  return BASE .. ':recent:' .. instance
end

local function recent_of(instance)
  return instance ~= '' and call('GET', recent_key(instance)) or ''
end

local function remember(instance, lines_of_it, unanswered)
  if instance == '' or lines_of_it == '' then
    return
  end
  local key = recent_key(instance)
  if unanswered and call('STRLEN', key) < RECENT_BYTES_MAX then
    call('APPEND', key, lines_of_it)
    call('PEXPIRE', key, '600000')
  else
    call('SET', key, lines_of_it, 'PX', '600000')
  end
end
