-- What every script of this contract shares: the queue's keys in their fixed order, the store's clock, and
-- the journal's lines.
-- ARGV[1] is what stands before every key of the queue, such as "bull:video-generation:".
--
-- The data is BullMQ's. Our own state of a job is one more field of its hash, `tn`:
--   ver state lease_until settled_fence settled_kind settled_due
-- the version and state that our journal left, the end of the lease, and how the last lease ended. An
-- active job that is not plain (see start.lua) has `running` there. The fence is BullMQ's own `ats`,
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
local lines, lines_n = {}, 0
