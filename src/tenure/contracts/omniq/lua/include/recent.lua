-- What one client's unanswered calls have done, so that a call sent again after a lost answer is recognised
-- even when the job has run and been trimmed since. A client whose calls are all answered leaves one
-- call's worth, and that for ten minutes; one with calls under way at any time, the latest of them.
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
  if not unanswered then
    call('SET', key, lines_of_it, 'PX', '600000')
    return
  end
  if call('APPEND', key, lines_of_it) > RECENT_BYTES_MAX then
    call('SET', key, call('GETRANGE', key, text[-RECENT_BYTES_MAX / 2], '-1')) -- the oldest goes
  end
  call('PEXPIRE', key, '600000')
end

-- A function that says whether one of those calls published a job, by id and hash; nil when there were none.
local function published_by(instance)
  local recent, asked, all = recent_of(instance), 0, nil
  if recent == '' then
    return nil
  end
  return function(id, payload_h)
    asked = asked + 1
    if asked < 20 then
      return find(recent, 'p\t' .. id .. '\t' .. payload_h .. '\n', 1, true)
    end
    if not all then -- so many questions: one pass for all
      all = {}
      for line in string.gmatch(recent, 'p\t([^\n]+)\n') do
        all[line] = true
      end
    end
    return all[id .. '\t' .. payload_h]
  end
end
