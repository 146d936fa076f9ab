-- What every script of this contract shares: quarantine, the queue's keys, the clock, the journal, and the writes
-- that are sent once at the end of a script, however many jobs it touched.
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

-- Commands that do not raise for what another program wrote. A value that the command for its key cannot read
-- is set aside, and the command runs again as on a missing key: so no script stops after its first write, and
-- no bad record is met twice. Any other error, such as a server that refuses writes, is raised as it is.
-- The stream `quarantine` has id, reason and a part of the content of the records that were set aside;
-- the value itself is kept for a week under `quarantine:<name>.<type>`. The list `quarantine:new` holds what no
-- worker has logged yet.
local set_aside_n = 0
local set_aside -- (key, reason)
local protected = redis.pcall
local write = redis.call -- for keys that the script has read before, so that their type is known

local function call(...)
  local reply = protected(...)
  if type(reply) == 'table' and reply.err then
    return set_aside(nil, reply.err, ...)
  end
  return reply
end

-- A number that another program may have written; `missing` where there is none, nil where it is no number or
-- too large to be counted with.
local function figure(words, missing)
  if not words or words == '' then
    return missing
  end
  local n = tonumber(words)
  return n and n > -9e15 and n < 9e15 and n or nil
end

-- Sets a key aside. With a command after the reason, which is then the server's error, only if that error is the
-- value's fault; the command runs again. All that is needed for it is made here: every script would pay for it.
function set_aside(key, reason, ...)
  local command = { ... }

  -- The first elements of a value, shortened, to be read by people.
  local function part_of(kind)
    local reads = { string = { 'GETRANGE', '0', '1023' }, list = { 'LRANGE', '0', '9' }, zset = { 'ZRANGE', '0', '9' },
      set = { 'SRANDMEMBER', '10' }, hash = { 'HRANDFIELD', '20', 'WITHVALUES' } }
    local read = reads[kind]
    local part = read and write(read[1], key, unpack(read, 2)) or ''
    if type(part) == 'table' then
      for i, each in ipairs(part) do
        part[i] = string.sub(each, 1, 100)
      end
      part = table.concat(part, ' ')
    end
    return string.sub(part, 1, 1024)
  end

  -- Holders of leases prove them by this table, so it is made anew at once, from its mirror and the jobs.
  local function restore_active()
    for _, id in ipairs(call('ZRANGE', BASE .. ':idx:active', '0', '9999')) do
      local v = call('HMGET', BASE .. ':job:' .. id, 'state', 'lock_until_ms')
      if v[1] == 'active' then
        call('ZADD', key, string.format('%.0f', figure(v[2]) or 0), id)
      end
    end
  end

  local function move_away()
    local kind = write('TYPE', key).ok
    if kind == 'none' then
      return
    end
    local quarantine = BASE .. ':quarantine'
    local name, part = string.sub(key, #BASE + 2, #BASE + 600), part_of(kind)
    local kept = quarantine .. ':' .. name .. '.' .. kind
    write('RENAME', key, kept)
    write('PEXPIRE', kept, '604800000')
    local id = string.match(name, '^job:(.*)$') or ''
    local why = string.sub(name .. ' is a ' .. kind .. '; ' .. reason, 1, 400)
    call('XADD', quarantine, 'MAXLEN', '~', '10000', '*', 'id', id, 'reason', why, 'raw', part, 'key', kept)
    call('RPUSH', quarantine .. ':new', id .. '\n' .. why)
    call('LTRIM', quarantine .. ':new', '-1000', '-1')
    call('HINCRBY', BASE .. ':counters', 'quarantined', '1')
    set_aside_n = set_aside_n + 1
    if id == '' then -- what stood in a lane is found again by its jobs' hashes
      call('HINCRBY', BASE .. ':upkeep', 'recount', '1')
    end
    if key == BASE .. ':active' then
      restore_active()
    end
  end

  if #command == 0 then
    return move_away()
  end
  key = command[2]
  for _, words in ipairs({ 'WRONGTYPE', 'not an integer', 'overflow', 'exceeds maximum', 'exhausted' }) do
    if string.find(reason, words, 1, true) then
      if command[1] == 'HINCRBY' and words ~= 'WRONGTYPE' then
        write('HDEL', key, command[3])
      else
        reason = command[1] .. ' cannot use it: ' .. reason
        move_away()
      end
      break
    end
  end
  return write(...)
end

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

-- @include journal

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
  add_line(plain(id), '\t' .. kind .. '\t' .. ver .. '\t' .. NOW_S .. '\t' .. task .. '\t' .. from
    .. '\t' .. to .. '\t' .. attempt .. '\t' .. fence .. '\t' .. prev_fence .. '\t' .. lease .. '\t'
    .. prev_lease .. '\t' .. worker .. '\t' .. max_attempts .. '\t' .. plain(gid)
    .. (rest and '\t' .. rest or ''))
end

-- A step moves jobs in several tables at once; each table is written once, by flush_moves.
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
  flush_journal(call)
  for name, n in pairs(counted) do
    call('HINCRBY', BASE .. ':counters', name, text[n])
  end
  if wake_wanted then -- idle workers of ours block on this stream
    call('XADD', BASE .. ':wake', 'MAXLEN', '1', '*', 'w', '1')
  end
end
