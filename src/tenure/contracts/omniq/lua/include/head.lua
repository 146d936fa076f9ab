-- What every script of this contract shares: quarantine, the queue's keys, the clock, the journal, and the writes that
-- are collected and sent once at the end of a script.
-- The including script sets GIVEN_NOW first: a caller's time in ms, or '0' for the server's clock.
--
-- The data is OmniQ's. Our own state of a job is one more field of its hash, `tn`, with eight values:
--   ver fence state lease_until worker settled_token settled_kind settled_due
-- The first four are as our last journal event left them; the last three say how the last lease ended. A job that only
-- other clients have changed has no such field.
-- @include text
local BASE = string.sub(KEYS[1], 1, -6) -- without ':meta'
local match, find, format = string.match, string.find, string.format

-- Quarantine. `call` runs a command. If the command fails because another program wrote another type or value, that
-- value is quarantined, and the command runs again as on a missing key. So no script stops after its first write, and
-- no script meets the same bad record again. Other errors, such as a server that refuses writes, are raised.
-- The stream `quarantine` has id, reason and a part of the content of each record. The value itself is kept for a week
-- as `quarantine:<name>.<type>`. The list `quarantine:new` has the records that no worker has logged yet.
local quarantined_n = 0
local quarantine -- (key, reason)
local protected = redis.pcall
local write = redis.call -- for keys whose type is known, because the script has read them

local function call(...)
  local reply = protected(...)
  if type(reply) == 'table' and reply.err then
    return quarantine(nil, reply.err, ...)
  end
  return reply
end

-- A number that another program may have written: `missing` if there is none, nil if it is not a number or too large
-- to calculate with.
local function figure(value, missing)
  if not value or value == '' then
    return missing
  end
  local n = tonumber(value)
  return n and n > -9e15 and n < 9e15 and n or nil
end

-- Quarantines a key. With a failed command after the reason, which is then its error, it does so only if the value is
-- the cause, and runs the command again. It defines its own helpers, because defining them costs time in every script.
function quarantine(key, reason, ...)
  local command = { ... }

  -- The first elements of a value, shortened, for the quarantine stream.
  local function excerpt(kind)
    local reads = { string = { 'GETRANGE', '0', '1023' }, list = { 'LRANGE', '0', '9' }, zset = { 'ZRANGE', '0', '9' },
      set = { 'SRANDMEMBER', '10' }, hash = { 'HRANDFIELD', '20', 'WITHVALUES' } }
    local read = reads[kind]
    local found = read and write(read[1], key, unpack(read, 2)) or ''
    if type(found) == 'table' then
      for i, each in ipairs(found) do
        found[i] = string.sub(each, 1, 100)
      end
      found = table.concat(found, ' ')
    end
    return string.sub(found, 1, 1024)
  end

  -- Leases are checked against this table, so it is made again at once, from its index table and the jobs.
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
    local stream = BASE .. ':quarantine'
    local name, raw = string.sub(key, #BASE + 2, #BASE + 600), excerpt(kind)
    local kept = stream .. ':' .. name .. '.' .. kind
    write('RENAME', key, kept)
    write('PEXPIRE', kept, '604800000')
    local id = string.match(name, '^job:(.*)$') or ''
    local why = string.sub(name .. ' is a ' .. kind .. '; ' .. reason, 1, 400)
    call('XADD', stream, 'MAXLEN', '~', '10000', '*', 'id', id, 'reason', why, 'raw', raw, 'key', kept)
    call('RPUSH', stream .. ':new', id .. '\n' .. why)
    call('LTRIM', stream .. ':new', '-1000', '-1')
    call('HINCRBY', BASE .. ':counters', 'quarantined', '1')
    quarantined_n = quarantined_n + 1
    if id == '' then -- a repair finds the jobs of a lost lane by their hashes
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
  for _, cause in ipairs({ 'WRONGTYPE', 'not an integer', 'overflow', 'exceeds maximum', 'exhausted' }) do
    if string.find(reason, cause, 1, true) then
      if command[1] == 'HINCRBY' and cause ~= 'WRONGTYPE' then
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

-- Runs `name key` with any number of members, in as few commands as unpack allows.
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

-- An id or name of another program, without control characters: they would break the journal's lines.
local function plain(name)
  if name and find(name, '%c') then
    return (string.gsub(name, '%c', ' '))
  end
  return name or ''
end

-- Adds an event to the journal. `rest`: result hash, payload hash, error code, due, data, joined by tabs; empty columns
-- at the end are left off.
local function note(id, kind, ver, task, from, to, attempt, fence, prev_fence, lease, prev_lease, worker,
    max_attempts, gid, rest)
  add_line(plain(id), '\t' .. kind .. '\t' .. ver .. '\t' .. NOW_S .. '\t' .. task .. '\t' .. from
    .. '\t' .. to .. '\t' .. attempt .. '\t' .. fence .. '\t' .. prev_fence .. '\t' .. lease .. '\t'
    .. prev_lease .. '\t' .. worker .. '\t' .. max_attempts .. '\t' .. plain(gid)
    .. (rest and '\t' .. rest or ''))
end

-- A script changes several tables for many jobs; flush_moves writes each table once.
local moved = {
  off = { wait = {}, active = {}, delayed = {}, failed = {}, completed = {} },
  on = { wait = {}, active = {}, delayed = {}, failed = {}, completed = {} },
}
local active_off, active_on = {}, {}
local dirty, times = {}, {}
local group_waiting = 0 -- the change of the counter `group_waiting`
local counted = {}
local needs_wake = false

local function count(name, n)
  counted[name] = (counted[name] or 0) + (n or 1)
end

-- Moves a job from one state to another in the index tables, which monitors read.
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

-- Writes the counters for monitors. If Redis knows a count, it is read and not added up, so that OmniQ 1.x, which does
-- not update counters, cannot make them wrong for good.
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

-- Every script that changes something calls this at its end.
local function flush()
  flush_moves()
  flush_stats()
  flush_journal(call)
  for name, n in pairs(counted) do
    call('HINCRBY', BASE .. ':counters', name, text[n])
  end
  if needs_wake then -- our idle workers block on this stream
    call('XADD', BASE .. ':wake', 'MAXLEN', '1', '*', 'w', '1')
  end
end
