-- How many jobs of one requester have not ended. If fewer than ARGV[3] jobs of all requesters have not ended, it
-- returns that number. If there are more than some hundred, it is an estimate from a sample. The jobs that were
-- submitted since the last delivery wait or are delayed; they are sampled evenly by their rank in the index, because a
-- stream has no access by position, and a sample by time finds too many jobs of those who submit slowly. For the other
-- entries of the stream, which run or were queued again, its first entries are the sample.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] requester  ARGV[3] the number of jobs from which the answer matters
-- Returns the number
-- Clauses S-24
-- @include step
local REQUESTER, MOST = ARGV[2], tonumber(ARGV[3])
local SAMPLE_MAX, FIRST_MAX = 240, 100

local queued, delayed = own('XLEN', STREAM), own('ZCARD', DELAYED)
if queued + delayed < MOST then
  return queued + delayed
end

-- Of these jobs: how many there are, each counted once; how many have not ended and are not delayed; and how many have
-- not ended and are the requester's. Without `with_delayed` the last number leaves delayed ones out.
local function count_of(ids, with_delayed)
  local seen, all, queued_n, mine = {}, 0, 0, 0
  for _, id in ipairs(ids) do
    if not seen[id] then
      seen[id] = true
      all = all + 1
      local v = pcall('HMGET', JOB .. id, 'requester', 'status', 'entry')
      if not v.err and (v[2] == 'queued' or v[2] == 'running') then
        local is_delayed = v[3] and string.sub(v[3], 1, 1) == '-'
        queued_n = is_delayed and queued_n or queued_n + 1
        mine = v[1] == REQUESTER and (with_delayed or not is_delayed) and mine + 1 or mine
      end
    end
  end
  return all, queued_n, mine
end

local function entries(most)
  local ids = {}
  local found = call('XRANGE', STREAM, '-', '+', 'COUNT', most)
  for _, entry in ipairs(found) do
    local fields = entry[2]
    for i = 1, #fields, 2 do
      if fields[i] == 'job_id' then
        ids[#ids + 1] = fields[i + 1]
      end
    end
  end
  return ids, found[1] and tonumber(match(found[1][1], '^%d+')) or 0
end

-- The time of the last entry that workers have received; 0 for none.
local function last_delivery()
  local groups = pcall('XINFO', 'GROUPS', STREAM)
  for _, flat in ipairs(groups.err and {} or groups) do
    local group = {}
    for i = 1, #flat, 2 do
      group[flat[i]] = flat[i + 1]
    end
    if group['name'] == GROUP then
      return tonumber(match(group['last-delivered-id'], '^%d+'))
    end
  end
  return 0
end

local sum = 0
if queued <= SAMPLE_MAX then
  local _, _, mine = count_of(entries(SAMPLE_MAX), true)
  sum = mine
else
  local _, first_ms = entries(1)
  local from = format('%d', math.max(first_ms, last_delivery()))
  local start = own('ZCOUNT', INDEX, '-inf', '(' .. from)
  local submitted = own('ZCARD', INDEX) - start
  local sample = {}
  local sampled = math.min(submitted, SAMPLE_MAX)
  for n = 1, sampled do
    local rank = format('%d', start + math.floor((n - 0.5) * submitted / sampled))
    sample[n] = call('ZRANGE', INDEX, rank, rank)[1]
  end
  local waiting = 0
  local all, queued_n, mine = count_of(sample)
  if queued_n > 0 then
    waiting = math.min(queued, submitted * queued_n / all)
    sum = waiting * mine / queued_n
  end
  if queued - waiting >= 1 then
    all, _, mine = count_of(entries(FIRST_MAX), true)
    sum = sum + (all > 0 and (queued - waiting) * mine / all or 0)
  end
end
if delayed > 0 then
  local all, _, mine = count_of(call('ZRANDMEMBER', DELAYED, SAMPLE_MAX), true)
  sum = sum + (all > 0 and delayed * mine / all or 0)
end
return math.floor(sum + 0.5)
