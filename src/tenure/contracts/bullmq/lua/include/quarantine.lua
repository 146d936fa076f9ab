-- Records that cannot be read. Such an id leaves its line and is met by no claim again; its key stays as it is,
-- and the stream `tenure:quarantine` keeps the id, the reason, the type and the first bytes of the content.
-- The including script has what head.lua defines.
local quarantined = {}

local function quarantine(id, reason)
  local QUARANTINE, KEPT, SAMPLE_MAX = PREFIX .. 'tenure:quarantine', '10000', 1024
  local key = PREFIX .. id
  local kind = call('TYPE', key).ok
  local read = { string = { 'GETRANGE', key, '0', SAMPLE_MAX - 1 }, list = { 'LRANGE', key, '0', '9' },
    set = { 'SRANDMEMBER', key, '10' }, zset = { 'ZRANGE', key, '0', '9', 'WITHSCORES' },
    stream = { 'XRANGE', key, '-', '+', 'COUNT', '3' }, hash = { 'HGETALL', key } }
  local parts = {}
  local function gather(value)
    if type(value) == 'table' then
      for _, each in ipairs(value) do
        gather(each)
      end
    else
      parts[#parts + 1] = tostring(value):sub(1, SAMPLE_MAX)
    end
  end
  if read[kind] and not (kind == 'hash' and call('HLEN', key) > 100) then
    gather(redis.pcall(unpack(read[kind])))
  end
  redis.pcall('XADD', QUARANTINE, 'MAXLEN', '~', KEPT, '*', 'id', id, 'reason', reason, 'type', kind, 'at', NOW_S,
    'raw', table.concat(parts, ' '):sub(1, SAMPLE_MAX))
  call('DEL', key .. ':lock') -- no worker holds it
  quarantined[#quarantined + 1] = { id, reason }
end

-- Writes to a key that every job passes through; one of another type is put aside first, as mend-16.lua does it.
local function put(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' then
    if not find(reply.err, 'WRONGTYPE', 1, true) then
      error(reply.err)
    end
    local name = key:sub(#PREFIX + 1)
    quarantine(name, 'the key is a ' .. call('TYPE', key).ok)
    local aside = PREFIX .. 'tenure:quarantine:' .. name
    call('RENAME', key, aside)
    call('PEXPIRE', aside, '604800000') -- a week
    call('SET', PREFIX .. 'tenure:restore', '') -- upkeep looks for jobs that stood there
    reply = call(command, key, ...)
  end
  return reply
end

-- A count that another program may have written; nil unless it is a whole number of at most 16 digits.
local function whole(words)
  return words and #words < 17 and find(words, '^%d+$') and tonumber(words) or nil
end
