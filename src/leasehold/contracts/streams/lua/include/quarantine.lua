-- Records that cannot be read. Any program can write into Redis, and one bad record must not stop a script for
-- all others: a script reads with pcall, sets aside what it cannot read, and goes on.
-- Each record is noted in the stream jobs:quarantine (job_id, reason, the first bytes of its content). A key of
-- the queue itself, or a job's event stream, that holds something else is renamed to jobs:quarantine:<its name>
-- and kept for a week. The including script has NS, STREAM, DELAYED, UPKEEP, PAUSED, call, pcall and counted.
local QUARANTINE = NS .. 'jobs:quarantine'
local QUARANTINE_MS = '604800000'
local aside = {} -- what this script has set aside: job id, reason, job id, reason, ...

local function printable(value, most)
  return (string.gsub(string.sub(value, 1, most), '[^ -~]', '?'))
end

local function rename_aside(key)
  local kept = QUARANTINE .. ':' .. string.sub(key, #NS + 1)
  if not pcall('RENAME', key, kept).err then
    call('PEXPIRE', kept, QUARANTINE_MS)
  end
  return kept
end

local function quarantine(id, why, raw)
  local shown, reason = string.gsub(string.sub(id, 1, 256), '%c', '?'), printable(why, 300)
  aside[#aside + 1], aside[#aside + 2] = shown, reason
  counted['quarantined'] = (counted['quarantined'] or 0) + 1
  for _ = 1, 2 do
    local added = pcall('XADD', QUARANTINE, 'MAXLEN', '~', '10000', '*', 'job_id', shown, 'reason', reason,
      'raw', string.sub(raw, 1, 1024))
    if not added.err then
      return
    end
    rename_aside(QUARANTINE)
  end
end

local own

-- Entries, due times or the index are gone: upkeep puts them back from the jobs' hashes as fast as it may.
local function begin_repair()
  own('HSET', UPKEEP, 'repair', '0', 'repair_all', '1')
end

local function replace_key(key, why)
  local kept = rename_aside(key)
  quarantine('', 'key ' .. string.sub(key, #NS + 1) .. ': ' .. why, 'kept as ' .. kept)
  if key == STREAM or key == DELAYED or key == INDEX then
    begin_repair()
  end
end

-- A command on a key of the queue itself. What another program has put there is moved away, and the command
-- is sent again. Errors that say nothing of the key (the server is full or read-only) are raised.
function own(command, key, ...)
  local reply = pcall(command, key, ...)
  local why = type(reply) == 'table' and reply.err
  if not why then
    return reply
  elseif string.find(why, 'WRONGTYPE', 1, true) or string.find(why, 'exhausted', 1, true) then
    replace_key(key, why)
  elseif command == 'HINCRBY' then -- the field is not a number, or the greatest there is
    call('HDEL', key, (...))
  end
  return call(command, key, ...)
end

-- A pause is the time at which it began. Anything else in its key is not one.
local function is_paused()
  local since = own('GET', PAUSED)
  if since and not string.find(since, '^%d+$') then
    replace_key(PAUSED, 'not a time')
    return false
  end
  return since ~= false
end
