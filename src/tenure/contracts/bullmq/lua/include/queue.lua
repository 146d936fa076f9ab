-- Shared by every script but settle-16.lua's plain completions: the queue's settings, a job's own state, the journal,
-- and the writes that a script sends once at its end (events trim, wake-up, journal).
-- @include head
-- @include journal
local TN = '^(%d+) (%S+) (%d+) (%d+ %S+ %d+)$' -- the field `tn`, see head.lua
local NEW_TN = '1 waiting 0 0 - 0'
local NOT_SETTLED = '0 - 0'

-- Version, state, lease end, and how the last lease ended (fence, kind and due time, in one text). The version is 0 for
-- a job that has no `tn`, because only other clients have touched it.
local function read_tn(words)
  if words == NEW_TN then
    return 1, 'waiting', '0', NOT_SETTLED
  elseif words then
    local ver, state, lease, settled = match(words, TN)
    if ver and #ver < 16 and #lease < 16 then
      return tonumber(ver), state == 'running' and 'active' or state, lease, settled
    end
  end
  return 0, '', '0', NOT_SETTLED
end

local settings = call('HMGET', META, 'paused', 'concurrency', 'max', 'duration', 'opts.maxLenEvents')
local IS_PAUSED = settings[1] and settings[1] ~= '' and true or false
local CONCURRENCY = whole(settings[2])
local EVENTS_MAX = whole(settings[5]) and settings[5] or '10000'

-- Raises, before the script writes anything, if a key that every job passes through has another type. The caller then
-- runs mend-16.lua and repeats the script. Writes to the other keys may fail, because no job depends on them.
local function check_types()
  call('LLEN', WAIT)
  call('LLEN', ACTIVE)
  call('ZCARD', PRIORITIZED)
  call('ZCARD', DELAYED)
  call('ZCARD', COMPLETED)
  call('ZCARD', FAILED)
  call('ZCARD', CHILDREN)
end

-- The table in a JSON text; an empty one if the text holds something else.
local function decoded(json)
  local ok, value = pcall(cjson.decode, json or '')
  return ok and type(value) == 'table' and value or {}
end

-- The number of members of a key; 0 for a key of another type.
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

-- B-34: a 5.x client pauses by renaming `wait` to `paused`, and resumes by renaming it back, over whatever `wait` holds
-- by then. A 6.x client leaves all jobs in `wait`. Keeping all jobs in `wait` is safe with both.
local function merge_paused()
  if call('EXISTS', PAUSED) == 0 then
    return
  end
  -- Claims pop the right end. Jobs in `paused` have waited at least as long as those in `wait`.
  local ids = call('LRANGE', PAUSED, '0', '-1')
  each_many('RPUSH', WAIT, ids)
  call('DEL', PAUSED)
end
if IS_PAUSED then
  merge_paused()
end

-- Writes that flush() makes once, however many jobs a script touches.
local must_wake, must_mark_due, must_trim = false, false, false
local at_end = {}

local function wake()
  must_wake = true
end

local function emit(...)
  must_trim = true
  return redis.pcall('XADD', EVENTS, '*', 'event', ...)
end

-- Names and ids come from other programs: a control character in them would break the lines of the journal.
local function plain(words)
  if words and find(words, '%c') then
    return (string.gsub(words, '%c', ' '))
  end
  return words or ''
end

-- The line of a journal event without its first part, the job id; ledger.py names the parts. `e` has kind, and of ver,
-- task, from, to, attempt and the others those that apply.
local function journal_tail(e)
  local fence = e.fence or '0'
  return '\t' .. e.kind .. '\t' .. (e.ver or '0') .. '\t' .. NOW_S .. '\t' .. plain(e.task) .. '\t'
    .. (e.from or '') .. '\t' .. (e.to or '') .. '\t' .. (e.attempt or '0') .. '\t' .. fence .. '\t'
    .. (e.prev_fence or fence) .. '\t' .. (e.lease or '0') .. '\t' .. (e.prev_lease or '0') .. '\t' .. (e.worker or '')
    .. '\t' .. (e.max_attempts or '0') .. '\t' .. (e.due or '0') .. '\t' .. (e.error or '') .. '\t'
    .. (e.payload_h or '') .. '\t' .. (e.result_h or '') .. '\t' .. (e.token_h or '') .. '\t' .. (e.priority or '0')
    .. '\t' .. (e.data or '')
end

local function note(e)
  add_line(plain(e.id), journal_tail(e))
end

-- An event of a job in another queue, whose keys begin with `prefix`.
local function note_in(prefix, e)
  redis.pcall('XADD', prefix .. 'tenure:journal', '*', 'e', plain(e.id) .. journal_tail(e))
end

-- Every script ends with this.
local function flush()
  if at_end[1] then
    at_end[1]()
  end
  -- No worker is woken while the queue is paused or its global concurrency is reached.
  if must_wake and not IS_PAUSED and not (CONCURRENCY and size('LLEN', ACTIVE) >= CONCURRENCY) then
    redis.pcall('ZADD', MARKER, '0', '0')
  end
  if must_mark_due then
    local first = redis.pcall('ZRANGE', DELAYED, '0', '0', 'WITHSCORES')
    if first[2] then
      redis.pcall('ZADD', MARKER, text[math.floor(first[2] / SLOTS)], '1')
    end
  end
  if must_trim then
    redis.pcall('XTRIM', EVENTS, 'MAXLEN', '~', EVENTS_MAX)
  end
  flush_journal(redis.pcall)
end
