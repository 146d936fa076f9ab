-- Commands that do not raise for what another program wrote. A value that the command for its key cannot read
-- is set aside, and the command runs again as on a missing key: so no script stops after its first write, and
-- no bad record is met twice. Any other error, such as a server that refuses writes, is raised as it is.
-- Of what is set aside the stream `quarantine` tells id, reason and a part of the content, for the last thousand;
-- the value itself is kept for a week under `quarantine:<name>.<type>`. The list `quarantine:new` holds what no
-- worker has logged yet.
local QUARANTINE = BASE .. ':quarantine'
local KEPT_MS, PART_BYTES = '604800000', 1024
local set_aside_n = 0
local set_aside, restore_active
local DAMAGE = { 'WRONGTYPE', 'not an integer', 'overflow', 'exceeds maximum', 'exhausted' }
local PARTS = {
  string = { 'GETRANGE', '0', '1023' }, list = { 'LRANGE', '0', '9' }, set = { 'SRANDMEMBER', '10' },
  zset = { 'ZRANGE', '0', '9' }, hash = { 'HRANDFIELD', '20', 'WITHVALUES' },
}

local function retried(err, name, key, ...)
  for _, words in ipairs(DAMAGE) do
    if find(err, words, 1, true) then
      if name == 'HINCRBY' and words ~= 'WRONGTYPE' then
        redis.call('HDEL', key, (...))
      else
        set_aside(key, name .. ' cannot use it: ' .. err)
      end
      break
    end
  end
  return redis.call(name, key, ...)
end

local function call(...)
  local reply = redis.pcall(...)
  if type(reply) == 'table' and reply.err then
    return retried(reply.err, ...)
  end
  return reply
end

-- A part of a value, for people: its first elements, each and all of them cut.
local function part_of(key, kind)
  local read = PARTS[kind]
  local part = read and redis.call(read[1], key, unpack(read, 2)) or ''
  if type(part) == 'table' then
    for i, each in ipairs(part) do
      part[i] = string.sub(each, 1, 100)
    end
    part = table.concat(part, ' ')
  end
  return string.sub(part, 1, PART_BYTES)
end

function set_aside(key, reason)
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then
    return
  end
  local name, part = string.sub(key, #BASE + 2, #BASE + 600), part_of(key, kind)
  local kept = QUARANTINE .. ':' .. name .. '.' .. kind
  redis.call('RENAME', key, kept)
  redis.call('PEXPIRE', kept, KEPT_MS)
  local id = string.match(name, '^job:(.*)$') or ''
  reason = string.sub(name .. ' is a ' .. kind .. '; ' .. reason, 1, 400)
  call('XADD', QUARANTINE, 'MAXLEN', '1000', '*', 'id', id, 'reason', reason, 'raw', part, 'key', kept)
  call('RPUSH', QUARANTINE .. ':new', id .. '\n' .. reason)
  call('LTRIM', QUARANTINE .. ':new', '-1000', '-1')
  call('HINCRBY', BASE .. ':counters', 'quarantined', '1')
  set_aside_n = set_aside_n + 1
  if id == '' then -- what stood in a lane is found again by its jobs' hashes
    call('HINCRBY', BASE .. ':upkeep', 'recount', '1')
  end
  if key == BASE .. ':active' then
    restore_active()
  end
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

-- Holders of leases prove them by this table, so it is made anew at once, from its mirror and the jobs.
function restore_active()
  for _, id in ipairs(call('ZRANGE', BASE .. ':idx:active', '0', '9999')) do
    local v = call('HMGET', BASE .. ':job:' .. id, 'state', 'lock_until_ms')
    if v[1] == 'active' then
      call('ZADD', BASE .. ':active', format('%.0f', figure(v[2]) or 0), id)
    end
  end
end

-- What was set aside and is not logged yet, at most a hundred; each is told to one worker.
local function news()
  return call('LPOP', QUARANTINE .. ':new', '100') or {}
end
