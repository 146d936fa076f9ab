-- What every script of this contract shares: the queue's keys in their fixed order, the store's clock, and how
-- records are set aside that cannot be read.
-- ARGV[1] is the prefix of every key of the queue, such as "bull:video-generation:".
--
-- The data is BullMQ's. Our own state of a job is one more field of its hash, `tn`:
--   ver state lease_until settled_fence settled_kind settled_due
-- the version and state that our journal left, the end of the lease, and how the last lease ended. An
-- active job that is not plain (see claim-16.lua) has `running` there. The fence is BullMQ's own `ats`,
-- which rises with every start, whoever starts the job.
-- Numbers become text once: Redis formats a Lua number at ten times the cost of a text.
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
local SLOTS = 4096 -- a due time's score is ms * 4096 + its place within the millisecond
local NEVER = 9007199254740992 -- the greatest score that is a due time
local MANY = 1000 -- unpack has a limit

-- Options of other programs may hold NaN and Infinity, which are no count and no time.
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

-- Records that cannot be read. Such an id leaves its list, so no claim meets it again; its key stays as it is,
-- and the stream `tenure:quarantine` keeps the id, the reason, the type and the first bytes of the content.
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
    call('SET', PREFIX .. 'tenure:restore', '') -- upkeep looks for the jobs that were in it
    reply = call(command, key, ...)
  end
  return reply
end

-- A count that another program may have written; nil unless it is a whole number of at most 16 digits.
local function whole(words)
  return words and #words < 17 and find(words, '^%d+$') and tonumber(words) or nil
end
