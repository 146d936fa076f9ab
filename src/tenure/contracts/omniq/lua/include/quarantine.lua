-- Commands that do not raise for what another program wrote. A value that the command for its key cannot read
-- is set aside, and the command runs again as on a missing key: so no script stops after its first write, and
-- no bad record is met twice. Any other error, such as a server that refuses writes, is raised as it is.
-- Of what is set aside the stream `quarantine` tells id, reason and a part of the content, for the last thousand;
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

  -- A part of a value, for people: its first elements, each and all of them cut.
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
