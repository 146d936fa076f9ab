-- Records what the unanswered calls of one instance did, so that a repeated call is recognised even if the job has run
-- and been trimmed since. If all calls of an instance are answered, only the last one is recorded; otherwise the latest
-- of them, up to a limit. The record expires after ten minutes.
local RECENT_BYTES_MAX = 1000000

local function recent_key(instance)
  return BASE .. ':recent:' .. instance
end

local function recent_of(instance)
  return instance ~= '' and call('GET', recent_key(instance)) or ''
end

local function remember(instance, new_lines, unanswered)
  if instance == '' or new_lines == '' then
    return
  end
  local key = recent_key(instance)
  if not unanswered then
    call('SET', key, new_lines, 'PX', '600000')
    return
  end
  if call('APPEND', key, new_lines) > RECENT_BYTES_MAX then
    call('SET', key, call('GETRANGE', key, text[-RECENT_BYTES_MAX / 2], '-1')) -- drop the older half
  end
  call('PEXPIRE', key, '600000')
end

-- Returns a function that says whether one of those calls published a job, by id and hash; nil if none is recorded.
local function published_by(instance)
  local recent, questions, all = recent_of(instance), 0, nil
  if recent == '' then
    return nil
  end
  return function(id, payload_h)
    questions = questions + 1
    if questions < 20 then
      return find(recent, 'p\t' .. id .. '\t' .. payload_h .. '\n', 1, true)
    end
    if not all then -- for many questions an index is faster than searching the text
      all = {}
      for line in string.gmatch(recent, 'p\t([^\n]+)\n') do
        all[line] = true
      end
    end
    return all[id .. '\t' .. payload_h]
  end
end
