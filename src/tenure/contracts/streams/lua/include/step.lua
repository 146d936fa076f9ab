-- What every script needs: the keys, the server's clock, quarantine, a job's events and their time to live, the
-- journal, the counters, queueing and the pause.
-- ARGV[1] is the prefix of every key ('' for the contract's exact names).
--
-- Each run of a script pays for the functions that it defines. What a plain submit or completion does not need is in
-- job.lua, which settle includes inside a function that is called only when needed.
local STREAM, JOURNAL, DELAYED, WAKE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local UPKEEP, STATS, INDEX, PAUSED, WORKERS = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local NS = ARGV[1]
local JOB = NS .. 'job:'
local GROUP = 'workers'
local call, pcall, match, format = redis.call, redis.pcall, string.match, string.format
local clock = call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOW_S = format('%s%03d', clock[1], clock[2] / 1000)
local counted = {}

-- Records that cannot be read. Any program can write into Redis, and one bad record must not stop a script for
-- all others: a script reads with pcall, sets aside what it cannot read, and goes on.
-- Each record is noted in the stream jobs:quarantine (job_id, reason, the first bytes of its content). A key of
-- the queue itself, or a job's event stream, that holds another type is renamed to jobs:quarantine:<its name>
-- and kept for a week.
local aside = {} -- what this script has set aside: job id, reason, job id, reason, ...
local quarantine_parts

-- Most scripts meet no bad record: the functions are made when the first one is met.
local function quarantine()
  if quarantine_parts then
    return quarantine_parts
  end
  local QUARANTINE = NS .. 'jobs:quarantine'
  local QUARANTINE_MS = '604800000'
  local made = {}
  quarantine_parts = made

  function made.printable(value, most)
    return (string.gsub(string.sub(value, 1, most), '[^ -~]', '?'))
  end

  function made.rename(key)
    local kept = QUARANTINE .. ':' .. string.sub(key, #NS + 1)
    if not pcall('RENAME', key, kept).err then
      call('PEXPIRE', kept, QUARANTINE_MS)
    end
    return kept
  end

  function made.add(id, why, raw)
    local shown = string.gsub(string.sub(id, 1, 256), '%c', '?')
    local reason = made.printable(why, 300)
    aside[#aside + 1], aside[#aside + 2] = shown, reason
    counted['quarantined'] = (counted['quarantined'] or 0) + 1
    for _ = 1, 2 do
      local added = pcall('XADD', QUARANTINE, 'MAXLEN', '~', '10000', '*', 'job_id', shown, 'reason', reason,
        'raw', string.sub(raw, 1, 1024))
      if not added.err then
        return
      end
      made.rename(QUARANTINE)
    end
  end

  -- Entries, due times or the index are lost: upkeep restores them from the jobs' hashes.
  function made.begin_repair(what)
    if type(pcall('HSET', UPKEEP, 'repair', '0', 'repair_all', what)) == 'table' then
      made.replace(UPKEEP, 'not a hash')
      call('HSET', UPKEEP, 'repair', '0', 'repair_all', what)
    end
  end

  function made.replace(key, why)
    local kept = made.rename(key)
    made.add('', 'key ' .. string.sub(key, #NS + 1) .. ': ' .. why, 'kept as ' .. kept)
    if key == STREAM or key == DELAYED or key == INDEX then
      made.begin_repair(key == INDEX and 'index' or 'entries')
    end
  end

  -- Errors that say nothing of the key (the server is full or read-only) are raised by the second call.
  function made.again(why, command, key, ...)
    if string.find(why, 'WRONGTYPE', 1, true) or string.find(why, 'exhausted', 1, true) then
      made.replace(key, why)
    elseif command == 'HINCRBY' then -- the field is not a number, or the greatest there is
      call('HDEL', key, (...))
    end
    return call(command, key, ...)
  end

  -- The event stream of a job that takes no event is moved away; the job goes on with a new one.
  function made.emit_anew(key, why, ...)
    local events, id = key .. ':events', string.sub(key, #JOB + 1)
    made.add(id, 'job:' .. id .. ':events: ' .. why, 'kept as ' .. made.rename(events))
    call('XADD', events, ...)
  end
  return made
end

-- A command on a key of the queue itself. What another program has put there is moved away, and the command
-- is sent again.
local function own(command, key, ...)
  local reply = pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    return quarantine().again(reply.err, command, key, ...)
  end
  return reply
end

-- When keys with this time to live expire. PEXPIREAT is sent and not EXPIRE, which Redis would rewrite for its
-- replicas at every call. False for a text that is no time: another program may have written the field, and its job
-- must not stop the script for all others.
local ends = {}
local TTL_S_MAX = 1e10
-- A running job outlives its lease by this, whatever its time to live: another worker must find it.
local RUNNING_MS = 60000

-- `lease_until` is given for jobs that run.
local function end_of(ttl_s, lease_until)
  local at = ends[ttl_s]
  if at == nil then
    local seconds = tonumber(ttl_s)
    at = seconds and seconds >= 1 and seconds <= TTL_S_MAX and format('%d', NOW + seconds * 1000) or false
    ends[ttl_s] = at
  end
  if at and lease_until and tonumber(at) < lease_until + RUNNING_MS then
    return format('%d', lease_until + RUNNING_MS)
  end
  return at
end

-- Gives the job and its event stream their whole time to live again.
local function refresh(key, ttl_s, lease_until)
  local at = ttl_s and end_of(ttl_s, lease_until)
  if at then
    call('PEXPIREAT', key, at)
    call('PEXPIREAT', key .. ':events', at)
  end
end

-- Appends an event (S-5); it refreshes the time to live (S-7).
local function emit(key, kind, step, data, ttl_s, lease_until)
  local events = key .. ':events'
  local added = pcall('XADD', events, '*', 'type', kind, 'ts', NOW_S, 'step', step, 'data', data)
  if added.err then
    quarantine().emit_anew(key, added.err, '*', 'type', kind, 'ts', NOW_S, 'step', step, 'data', data)
  end
  refresh(key, ttl_s, lease_until)
end

-- @include journal

-- Every script ends here: what it noted and counted is written.
local function flush()
  flush_journal(own)
  while next(counted) do -- a key that is set aside here is counted too
    local totals = counted
    counted = {}
    for name, n in pairs(totals) do
      own('HINCRBY', STATS, name, format('%d', n))
    end
  end
end

-- Wakes workers that wait with an empty queue, for what does not show in the stream itself.
local function wake()
  own('XADD', WAKE, 'MAXLEN', '1', '*', 'w', '1')
end

-- Puts a job where the next claim finds it: into the stream, or into the delayed set until it is due. Returns the
-- entry's id, "-" while there is none.
local function enqueue(id, task, payload, due)
  if due > NOW then
    own('ZADD', DELAYED, format('%d', due), id)
    wake()
    return '-'
  end
  return own('XADD', STREAM, '*', 'job_id', id, 'task', task, 'payload', payload)
end

-- Whether the queue hands out no leases. A pause is the time at which it began; anything else in its key is not one.
local function is_paused()
  local since = own('GET', PAUSED)
  if since and not string.find(since, '^%d+$') then
    quarantine().replace(PAUSED, 'not a time')
    return false
  end
  return since ~= false
end
