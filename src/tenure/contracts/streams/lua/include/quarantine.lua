-- Records that cannot be read. Any program can write into Redis, and one bad record must not stop a script for
-- all others: a script reads with pcall, sets aside what it cannot read, and goes on.
-- Each record is noted in the stream jobs:quarantine (job_id, reason, the first bytes of its content). A key of
-- the queue itself, or a job's event stream, that holds something else is renamed to jobs:quarantine:<its name>
-- and kept for a week. The including script has NS, JOB, STREAM, DELAYED, INDEX, UPKEEP, PAUSED, call, pcall and
-- counted.
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

  -- Entries, due times or the index are gone: upkeep puts them back from the jobs' hashes as fast as it may.
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
