-- What every script needs: the keys, the server's clock, quarantine, a job's events and their time to live, the
-- journal, the counters, queueing and the pause.
-- ARGV[1] is the prefix of every key ('' for the contract's exact names).
--
-- Defining a function costs time in every run of a script. So what a submit or a completion does not need is in
-- job.lua, which settle includes inside a function that it calls only when needed.
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

-- Quarantine. Any program can write into Redis, and a record that cannot be read must not stop the script for all
-- other jobs. So scripts read with pcall, quarantine what they cannot read, and continue. The stream jobs:quarantine
-- gets an entry for each record: job_id, reason, the first bytes of its content. If a key of the queue itself, or a
-- job's event stream, has another type, it is renamed to jobs:quarantine:<its name> and kept for a week.
local quarantined = {} -- by this script: job id, reason, job id, reason, ...
local quarantine_functions

-- Few scripts meet a bad record, so the functions are defined when the first one is met.
local function quarantine()
  if quarantine_functions then
    return quarantine_functions
  end
  local QUARANTINE = NS .. 'jobs:quarantine'
  local QUARANTINE_MS = '604800000'
  local made = {}
  quarantine_functions = made

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
    quarantined[#quarantined + 1], quarantined[#quarantined + 2] = shown, reason
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

  -- Entries, due times or the index were lost; upkeep will restore them from the jobs' hashes.
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

  -- Runs a failed command again after the bad key or field was moved away. Other errors (the server is full or
  -- read-only) are raised by the second call.
  function made.again(why, command, key, ...)
    if string.find(why, 'WRONGTYPE', 1, true) or string.find(why, 'exhausted', 1, true) then
      made.replace(key, why)
    elseif command == 'HINCRBY' then -- the field is not a number, or the largest one
      call('HDEL', key, (...))
    end
    return call(command, key, ...)
  end

  -- If a job's event stream accepts no event, it is moved away, and the job gets a new one.
  function made.emit_anew(key, why, ...)
    local events, id = key .. ':events', string.sub(key, #JOB + 1)
    made.add(id, 'job:' .. id .. ':events: ' .. why, 'kept as ' .. made.rename(events))
    call('XADD', events, ...)
  end
  return made
end

-- A command on a key of the queue itself. If another program has written another type there, the key is moved away,
-- and the command runs again.
local function own(command, key, ...)
  local reply = pcall(command, key, ...)
  if type(reply) == 'table' and reply.err then
    return quarantine().again(reply.err, command, key, ...)
  end
  return reply
end

-- The time at which keys with this time to live expire. It is for PEXPIREAT, because Redis rewrites EXPIRE for its
-- replicas at every call. False if the field is not a number: another program may have written it.
local expiry_times = {}
local TTL_S_MAX = 1e10
-- A running job exists at least this long after its lease has expired, so that another worker finds it.
local RUNNING_MS = 60000

-- A delayed job gets its time to live from when it is due. This is the `lease_until` that has that effect; nil for a job
-- that is not delayed.
local function wait_until(due, ttl_s)
  return due > NOW and due + (tonumber(ttl_s) or 0) * 1000 - RUNNING_MS or nil
end

-- `lease_until` is given for running and delayed jobs.
local function expires_at(ttl_s, lease_until)
  local at = expiry_times[ttl_s]
  if at == nil then
    local seconds = tonumber(ttl_s)
    at = seconds and seconds >= 1 and seconds <= TTL_S_MAX and format('%d', NOW + seconds * 1000) or false
    expiry_times[ttl_s] = at
  end
  if at and lease_until and tonumber(at) < lease_until + RUNNING_MS then
    return format('%d', lease_until + RUNNING_MS)
  end
  return at
end

-- Sets the time to live of the job and its event stream anew.
local function refresh(key, ttl_s, lease_until)
  local at = ttl_s and expires_at(ttl_s, lease_until)
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

-- Every script calls this at its end: it writes journal and counters.
local function flush()
  flush_journal(own)
  while next(counted) do -- `own` may quarantine a key, which is counted too
    local totals = counted
    counted = {}
    for name, n in pairs(totals) do
      own('HINCRBY', STATS, name, format('%d', n))
    end
  end
end

-- Wakes workers that wait on an empty queue, for changes that add no entry to the stream.
local function wake()
  own('XADD', WAKE, 'MAXLEN', '1', '*', 'w', '1')
end

-- Adds a job to the stream, or to the delayed set if it is not due yet. Returns the id of its entry, '-' for none.
local function enqueue(id, task, payload, due)
  if due > NOW then
    own('ZADD', DELAYED, format('%d', due), id)
    wake()
    return '-'
  end
  return own('XADD', STREAM, '*', 'job_id', id, 'task', task, 'payload', payload)
end

-- Whether the queue is paused. The value of the key is the time of the pause; any other value is quarantined.
local function is_paused()
  local since = own('GET', PAUSED)
  if since and not string.find(since, '^%d+$') then
    quarantine().replace(PAUSED, 'not a time')
    return false
  end
  return since ~= false
end
