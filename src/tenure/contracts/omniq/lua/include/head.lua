-- What every script of this contract shares: the queue's keys, the clock, the journal, and the writes
-- that leave once at the end of a script, however many jobs it touched.
-- The including script sets GIVEN_NOW first: a caller's time in ms, or '0' for the server's clock.
--
-- The data is OmniQ's. Our own state of a job is one more field of its hash, `tn`, eight words:
--   ver fence state lease_until worker settled_token settled_kind settled_due
-- version, fence, state and lease end as our journal left them, and how the last lease ended. A job
-- that only other clients have touched has no such field.
-- Numbers become text once: Redis formats a Lua number at ten times the cost of a text, and differently
-- from 1e14 on.
local BASE = string.sub(KEYS[1], 1, -6) -- the anchor is BASE:meta, and is never written
local match, find, format = string.match, string.find, string.format
-- @include quarantine
local NOW = figure(GIVEN_NOW, 0) or 0
if NOW <= 0 then
  local clock = call('TIME')
  NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
end
local NOW_S = format('%.0f', NOW)
local WAIT, ACTIVE, DELAYED = BASE .. ':wait', BASE .. ':active', BASE .. ':delayed'
local FAILED, COMPLETED, READY = BASE .. ':failed', BASE .. ':completed', BASE .. ':groups:ready'
local STATS, JOURNAL, IDX = BASE .. ':stats', BASE .. ':journal', BASE .. ':idx:'
local JOB, GROUP = BASE .. ':job:', BASE .. ':g:'
local MANY = 2000 -- unpack has a limit

local text = setmetatable({}, {
  __index = function(cache, number)
    local made = format('%.0f', number)
    cache[number] = made
    return made
  end,
})

-- Calls `name key` with any number of members in as few commands as unpack allows.
local function each_many(name, key, members)
  local n = #members
  if n == 0 then
    return
  end
  for from = 1, n, MANY do
    call(name, key, unpack(members, from, math.min(from + MANY - 1, n)))
  end
end

-- The journal. Events gather while a script runs and leave as few entries: history costs a text and not
-- a command. `lines` alternates field name and event; journal.py reads it.
local lines, lines_n = {}, 0

local function add_line(line)
  lines[lines_n + 1] = 'e'
  lines_n = lines_n + 2
  lines[lines_n] = line
end

-- Ids and names come from other programs: nothing in them may break the journal's lines.
local function plain(words)
  if words and find(words, '%c') then
    return (string.gsub(words, '%c', ' '))
  end
  return words or ''
end

-- `rest`: result hash, payload hash, error code, due, data, joined by tabs; what does not apply is left off.
local function note(id, kind, ver, task, from, to, attempt, fence, prev_fence, lease, prev_lease, worker,
    max_attempts, gid, rest)
  add_line(plain(id) .. '\t' .. kind .. '\t' .. ver .. '\t' .. NOW_S .. '\t' .. task .. '\t' .. from
    .. '\t' .. to .. '\t' .. attempt .. '\t' .. fence .. '\t' .. prev_fence .. '\t' .. lease .. '\t'
    .. prev_lease .. '\t' .. worker .. '\t' .. max_attempts .. '\t' .. plain(gid)
    .. (rest and '\t' .. rest or ''))
end

-- Where jobs stand changes in several tables at once; each is written once, by flush_moves.
local moved = {
  off = { wait = {}, active = {}, delayed = {}, failed = {}, completed = {} },
  on = { wait = {}, active = {}, delayed = {}, failed = {}, completed = {} },
}
local active_off, active_on = {}, {}
local dirty, times = {}, {}
local group_waiting = 0 -- by how much it changed
local counted = {}
local wake_wanted = false

local function count(name, n)
  counted[name] = (counted[name] or 0) + (n or 1)
end

-- The job left one state for another: the mirror tables that monitors read follow.
local function move(id, from, to)
  if from then
    local off = moved.off[from]
    off[#off + 1] = id
    dirty[from] = true
  end
  if to then
    local on = moved.on[to]
    local n = #on
    on[n + 1], on[n + 2] = NOW_S, id
    dirty[to] = true
  end
end

local function flush_moves()
  for state, ids in pairs(moved.off) do
    if #ids > 0 then
      each_many('ZREM', IDX .. state, ids)
      moved.off[state] = {}
    end
  end
  for state, flat in pairs(moved.on) do
    if #flat > 0 then
      each_many('ZADD', IDX .. state, flat)
      moved.on[state] = {}
    end
  end
  if #active_off > 0 then
    each_many('ZREM', ACTIVE, active_off)
    active_off = {}
  end
  if #active_on > 0 then
    each_many('ZADD', ACTIVE, active_on)
    active_on = {}
  end
end

-- The counters of monitors. Whatever can be counted at once is counted and not added up, so that a
-- client that keeps no counters (OmniQ 1.x) cannot make them wrong for good.
local function flush_stats()
  local set, n = {}, 0
  local function put(name, value)
    set[n + 1], set[n + 2] = name, value
    n = n + 2
  end
  if dirty.wait then
    local waiting = call('LLEN', WAIT)
    local grouped = figure(call('HGET', STATS, 'group_waiting'), 0) or 0
    grouped = math.max(0, grouped + group_waiting)
    put('waiting', text[waiting])
    put('group_waiting', text[grouped])
    put('waiting_total', text[waiting + grouped])
  end
  if dirty.active then
    put('active', text[call('ZCARD', ACTIVE)])
  end
  if dirty.delayed then
    put('delayed', text[call('ZCARD', DELAYED)])
  end
  if dirty.failed then
    put('failed', text[call('LLEN', FAILED)])
  end
  if dirty.completed then
    put('completed_kept', text[call('LLEN', COMPLETED)])
  end
  if dirty.groups then
    put('groups_ready', text[call('ZCARD', READY)])
  end
  for name, is_new in pairs(times) do
    if is_new then
      put(name, NOW_S)
    end
  end
  if n > 0 then
    put('last_activity_ms', NOW_S)
    call('HSET', STATS, unpack(set))
  end
end

-- Every script that changes something ends here.
local function flush()
  flush_moves()
  flush_stats()
  for from = 1, lines_n, 200 do
    call('XADD', JOURNAL, '*', unpack(lines, from, math.min(from + 199, lines_n)))
  end
  for name, n in pairs(counted) do
    call('HINCRBY', BASE .. ':counters', name, text[n])
  end
  if wake_wanted then -- idle workers of ours block on this stream
    call('XADD', BASE .. ':wake', 'MAXLEN', '1', '*', 'w', '1')
  end
end
