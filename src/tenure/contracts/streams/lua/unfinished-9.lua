-- How many jobs of one requester have not ended. If fewer than ARGV[3] jobs of all requesters have not ended, it
-- returns that number. If there are more than some hundred, it reads a sample from both ends of the stream and from
-- places between them, and assumes that the requester has the same fraction of all jobs as of the sample.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] requester  ARGV[3] the number of jobs from which the answer matters
-- Returns the number
-- Clauses S-24
-- @include step
local REQUESTER, MOST = ARGV[2], tonumber(ARGV[3])
local SAMPLE_MAX, SAMPLES = 240, 10

local queued, delayed = own('XLEN', STREAM), own('ZCARD', DELAYED)
if queued + delayed < MOST then
  return queued + delayed
end

-- The fraction of these jobs that are the requester's and have not ended; each job counts once.
local function fraction_of(ids)
  local seen, jobs_n, mine = {}, 0, 0
  for _, id in ipairs(ids) do
    if not seen[id] then
      seen[id] = true
      jobs_n = jobs_n + 1
      local v = pcall('HMGET', JOB .. id, 'requester', 'status')
      if not v.err and v[1] == REQUESTER and (v[2] == 'queued' or v[2] == 'running') then
        mine = mine + 1
      end
    end
  end
  return jobs_n > 0 and mine / jobs_n or 0
end

local ids = {}
local function add_ids(entries)
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

if queued <= SAMPLE_MAX then
  add_ids(call('XRANGE', STREAM, '-', '+'))
else
  local some = SAMPLE_MAX / SAMPLES
  local first = add_ids(call('XRANGE', STREAM, '-', '+', 'COUNT', some))
  local last = add_ids(call('XREVRANGE', STREAM, '+', '-', 'COUNT', some))
  local from = tonumber(match(first[1][1], '^%d+'))
  local to = tonumber(match(last[1][1], '^%d+'))
  for n = 1, SAMPLES - 2 do
    local at = format('%d', from + (to - from) * n / (SAMPLES - 1))
    add_ids(call('XRANGE', STREAM, at, '+', 'COUNT', some))
  end
end
local mine = queued * fraction_of(ids)
if delayed > 0 then
  mine = mine + delayed * fraction_of(call('ZRANDMEMBER', DELAYED, SAMPLE_MAX))
end
return math.floor(mine + 0.5)
