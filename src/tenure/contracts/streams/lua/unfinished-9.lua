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

-- How many of these jobs have not ended, and how many of them are the requester's; those that are in `seen` or, without
-- `with_delayed`, delayed are left out.
local function count_of(ids, seen, with_delayed)
  local all, mine = 0, 0
  for _, id in ipairs(ids) do
    if not seen[id] then
      seen[id] = true
      local v = pcall('HMGET', JOB .. id, 'requester', 'status', 'entry')
      if not v.err and (v[2] == 'queued' or v[2] == 'running')
        and (with_delayed or not v[3] or string.sub(v[3], 1, 1) ~= '-') then
        all = all + 1
        mine = v[1] == REQUESTER and mine + 1 or mine
      end
    end
  end
  return all, mine
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
  local _, mine = count_of(entries(SAMPLE_MAX), {}, true)
  sum = mine
else
  local first, first_ms = entries(FIRST_MAX)
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
  if sampled > 0 then
    local all, mine = count_of(sample, {})
    local most = math.min(submitted, all > 0 and queued * sampled / all or 0)
    waiting, sum = most * all / sampled, most * mine / sampled
  end
  local all, mine = count_of(first, {}, true)
  if all > 0 then
    sum = sum + (queued - waiting) * mine / all
  end
end
if delayed > 0 then
  local all, mine = count_of(call('ZRANDMEMBER', DELAYED, SAMPLE_MAX), {}, true)
  sum = sum + (all > 0 and delayed * mine / all or 0)
end
return math.floor(sum + 0.5)
