-- What every full script of this contract shares: the queue's settings, and the writes that leave once at
-- the end of a script (journal, wake-ups, trim).
-- @include head
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

local settings = call('HMGET', META, 'paused', 'concurrency', 'max', 'duration', 'opts.maxLenEvents')
local IS_PAUSED = settings[1] and settings[1] ~= '' and true or false
local CONCURRENCY = whole(settings[2])
local EVENTS_MAX = whole(settings[5]) and settings[5] or '10000'

-- Raises, before a script writes anything, when a key that every job passes through has another type; the caller
-- then runs mend-16.lua and repeats the script. What is written to the other keys may fail: no job depends on it.
local function prove()
  call('LLEN', WAIT)
  call('LLEN', ACTIVE)
  call('ZCARD', PRIORITIZED)
  call('ZCARD', DELAYED)
  call('ZCARD', COMPLETED)
  call('ZCARD', FAILED)
  call('ZCARD', CHILDREN)
end

-- The table that a JSON text holds; an empty one where it holds none.
local function decoded(json)
  local ok, value = pcall(cjson.decode, json or '')
  return ok and type(value) == 'table' and value or {}
end

-- How many members a key has; none when it is of another type.
local function size(command, key)
  local members = redis.pcall(command, key)
  return type(members) == 'number' and members or 0
end

-- Calls `name key` with any number of members in as few commands as unpack allows.
local function each_many(name, key, members)
  for from = 1, #members, MANY do
    put(name, key, unpack(members, from, math.min(from + MANY - 1, #members)))
  end
end

-- A 5.x client pauses by renaming `wait` to `paused` and resumes by renaming it back, over whatever is
-- in `wait`; a 6.x client leaves everything in `wait`. One list is safe with both: `wait`. (B-34)
local function merge_paused()
  if call('EXISTS', PAUSED) == 0 then
    return
  end
  -- The right end is served first: what stood in `paused` waited longer or as long.
  local late = call('LRANGE', PAUSED, '0', '-1')
  each_many('RPUSH', WAIT, late)
  call('DEL', PAUSED)
end
if IS_PAUSED then
  merge_paused()
end

-- What happens at the end: each of these is written at most once, however many jobs a script touches.
local wake_wanted, due_changed, trim_wanted = false, false, false
local at_end = {}

local function wake()
  wake_wanted = true
end

local function emit(...)
  trim_wanted = true
  return redis.pcall('XADD', EVENTS, '*', 'event', ...)
end

-- Names and ids come from other programs: nothing in them may break the journal's lines.
local function plain(words)
  if words and find(words, '%c') then
    return (string.gsub(words, '%c', ' '))
  end
  return words or ''
end

-- An event of the journal as one line; journal.py names its fields. `e` has id, kind, ver, task, from, to, and what
-- else applies.
local function journal_line(e)
  local fence = e.fence or '0'
  return plain(e.id) .. '\t' .. e.kind .. '\t' .. (e.ver or '0') .. '\t' .. NOW_S .. '\t' .. plain(e.task) .. '\t'
    .. (e.from or '') .. '\t' .. (e.to or '') .. '\t' .. (e.attempt or '0') .. '\t' .. fence .. '\t'
    .. (e.prev_fence or fence) .. '\t' .. (e.lease or '0') .. '\t' .. (e.prev_lease or '0') .. '\t' .. (e.worker or '')
    .. '\t' .. (e.max_attempts or '0') .. '\t' .. (e.due or '0') .. '\t' .. (e.error or '') .. '\t'
    .. (e.payload_h or '') .. '\t' .. (e.result_h or '') .. '\t' .. (e.token_h or '') .. '\t' .. (e.priority or '0')
    .. '\t' .. (e.data or '')
end

-- Events gather while a script runs and leave in few entries: history costs a text and not a command. `lines`
-- alternates field name and event.
local lines, lines_n = {}, 0
local function note(e)
  lines[lines_n + 1] = 'e'
  lines_n = lines_n + 2
  lines[lines_n] = journal_line(e)
end

-- Every script ends here.
local function flush()
  if at_end[1] then
    at_end[1]()
  end
  -- A job is claimable by somebody unless the queue is paused or as many run as may.
  if wake_wanted and not IS_PAUSED and not (CONCURRENCY and size('LLEN', ACTIVE) >= CONCURRENCY) then
    redis.pcall('ZADD', MARKER, '0', '0')
  end
  if due_changed then
    local first = redis.pcall('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
    if first[2] then
      redis.pcall('ZADD', MARKER, text[math.floor(first[2] / SLOTS)], '1')
    end
  end
  if trim_wanted then
    redis.pcall('XTRIM', EVENTS, 'MAXLEN', '~', EVENTS_MAX)
  end
  if lines_n == 2 then
    redis.pcall('XADD', JOURNAL, '*', 'e', lines[2])
  else
    for from = 1, lines_n, 200 do
      redis.pcall('XADD', JOURNAL, '*', unpack(lines, from, math.min(from + 199, lines_n)))
    end
  end
end
