-- How many jobs of one requester have not ended. Where fewer than asked for have not ended at all, that
-- number is the answer. Of more than some hundred, those at both ends of the stream and here and there
-- between them are looked at, and the requester's share of them is taken for its share of all.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] requester  ARGV[3] from how many on it matters
-- Returns the number
-- Clauses S-24
-- @include step
local REQUESTER, MOST = ARGV[2], tonumber(ARGV[3])
local LOOKED_MAX, PARTS = 240, 10

local queued, delayed = own('XLEN', STREAM), own('ZCARD', DELAYED)
if queued + delayed < MOST then
  return queued + delayed
end

-- Of which jobs how many are the requester's and have not ended; each is looked at once.
local function share(ids)
  local seen, looked, mine = {}, 0, 0
  for _, id in ipairs(ids) do
    if not seen[id] then
      seen[id] = true
      looked = looked + 1
      local v = pcall('HMGET', JOB .. id, 'requester', 'status')
      if not v.err and v[1] == REQUESTER and (v[2] == 'queued' or v[2] == 'running') then
        mine = mine + 1
      end
    end
  end
  return looked > 0 and mine / looked or 0
end

local ids = {}
local function take(entries)
  for _, entry in ipairs(entries) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'job_id' then
        ids[#ids + 1] = fields[i + 1]
      end
    end
  end
  return entries
end

if queued <= LOOKED_MAX then
  take(call('XRANGE', STREAM, '-', '+'))
else
  local some = LOOKED_MAX / PARTS
  local first = take(call('XRANGE', STREAM, '-', '+', 'COUNT', some))
  local last = take(call('XREVRANGE', STREAM, '+', '-', 'COUNT', some))
  local from = tonumber(match(first[1][1], '^%d+'))
  local to = tonumber(match(last[1][1], '^%d+'))
  for n = 1, PARTS - 2 do
    local at = format('%d', from + (to - from) * n / (PARTS - 1))
    take(call('XRANGE', STREAM, at, '+', 'COUNT', some))
  end
end
local mine = queued * share(ids)
if delayed > 0 then
  mine = mine + delayed * share(call('ZRANDMEMBER', DELAYED, LOOKED_MAX))
end
return math.floor(mine + 0.5)
