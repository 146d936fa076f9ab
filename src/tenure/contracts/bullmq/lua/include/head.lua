-- Shared by every script of this contract: the queue's keys, the server's clock, and the quarantine for records that
-- cannot be read.
-- ARGV[1] is the prefix of every key of the queue, such as "bull:video-generation:".
--
-- The data is BullMQ's. Our own state of a job is one more field of its hash, `tn`, six words:
--   ver state lease_until settled_fence settled_kind settled_due
-- The first three are version, state and lease end as of the job's last journal event. The other three say how its
-- last lease ended. The state of an active job is `active` if the job is plain (see claim-16.lua), else `running`.
-- The fence is BullMQ's own `ats`, which grows with every start, whichever client starts the job.
-- Numbers are converted to text once: Redis formats a Lua number at ten times the cost of a text.
local WAIT, ACTIVE, PRIORITIZED, DELAYED = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local PAUSED, META, EVENTS, MARKER = KEYS[5], KEYS[6], KEYS[7], KEYS[8]
local STALLED, LIMITER, PC, COMPLETED = KEYS[9], KEYS[10], KEYS[11], KEYS[12]
local FAILED, CHILDREN, ID, JOURNAL = KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local PREFIX = ARGV[1]
local call = redis.call
local match, find = string.match, string.find
local clock = call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOW_S = string.format('%.0f', NOW)
local SLOTS = 4096 -- the score of a due time is ms * 4096 + its place within the millisecond
local NEVER = 9007199254740992 -- the greatest score of a due time
local MANY = 1000 -- unpack has a limit

-- Options of other programs may hold NaN and Infinity; both become 0.
local text = setmetatable({}, {
  __index = function(cache, number)
    if number ~= number or number == math.huge or number == -math.huge then
      return '0'
    end
    local made = string.format('%.0f', number)
    cache[number] = made
    return made
  end,
})

-- Records that cannot be read. The id of such a record is removed from its list, so that no claim finds it again. Its
-- key is not changed. The stream `tenure:quarantine` keeps the id, the reason, the type and the first bytes of the
-- content.
local quarantined = {}

local function quarantine(id, reason)
  local QUARANTINE, LENGTH_MAX, SAMPLE_MAX = PREFIX .. 'tenure:quarantine', '10000', 1024
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
  redis.pcall('XADD', QUARANTINE, 'MAXLEN', '~', LENGTH_MAX, '*', 'id', id, 'reason', reason, 'type', kind,
    'at', NOW_S, 'raw', table.concat(parts, ' '):sub(1, SAMPLE_MAX))
  call('DEL', key .. ':lock') -- no worker can hold it
  quarantined[#quarantined + 1] = { id, reason }
end

-- A write to a key that every job passes through. A key of another type is renamed first, as mend-16.lua does it.
local function put(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) == 'table' then
    if not find(reply.err, 'WRONGTYPE', 1, true) then
      error(reply.err)
    end
    local name = key:sub(#PREFIX + 1)
    quarantine(name, 'the key is a ' .. call('TYPE', key).ok)
    local renamed = PREFIX .. 'tenure:quarantine:' .. name
    call('RENAME', key, renamed)
    call('PEXPIRE', renamed, '604800000') -- a week
    call('SET', PREFIX .. 'tenure:restore', '') -- upkeep searches for the jobs that were in the key
    reply = call(command, key, ...)
  end
  return reply
end

-- A count that another program may have written; nil unless it is a whole number of at most 16 digits.
local function whole(digits)
  return digits and #digits < 17 and find(digits, '^%d+$') and tonumber(digits) or nil
end
