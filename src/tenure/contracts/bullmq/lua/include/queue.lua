-- The queue's settings, our own state of a job, the journal, and the writes that a script sends once at its end (events
-- trim, wake-up, journal). A claim that only takes jobs needs no more than this. A script pays for every function that
-- it defines, so what other scripts need is in step.lua.
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
local at_end -- a function of finish.lua

local function wake()
  must_wake = true
end

-- Every script ends with this.
local function flush()
  if at_end then
    at_end()
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
