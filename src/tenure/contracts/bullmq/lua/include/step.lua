-- Shared by every script but the plain paths of claim-16.lua and settle-16.lua: check of key types, events, notes in
-- the journal.
-- @include queue

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
