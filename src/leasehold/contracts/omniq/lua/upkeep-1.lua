-- Promotes what is due, takes back leases that ran out, trims the journal, forgets workers that are long
-- gone. Every worker may call it; each part is bounded.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] worker id, seen to be alive by this  ARGV[3] chance for jitter
-- ARGV[4] journal size in bytes  ARGV[5] journal age in ms  ARGV[6] age of a worker to forget, in ms
-- ARGV[7] completed jobs to keep  ARGV[8] failed jobs to keep  ARGV[9] how many jobs the worker runs at once
-- ARGV[10] age in ms of journal that is captured later
-- Returns { promoted, reclaimed, buried, expired, trimmed, 1 when the tables need to be mended }
-- Clauses O-21 O-22 O-39 O-51
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include groups
-- @include job
-- @include ending
-- @include tending
KEEP_COMPLETED, KEEP_FAILED = tonumber(ARGV[7]), tonumber(ARGV[8])
local UPKEEP, WORKERS, CLAIMS = BASE .. ':upkeep', BASE .. ':workers', BASE .. ':claims'
-- @include trim
local BATCH = 200

local function forget(key, at_of)
  local all = call('HGETALL', key)
  for i = 1, #all, 2 do
    if NOW - at_of(all[i + 1]) > tonumber(ARGV[6]) then
      call('HDEL', key, all[i])
    end
  end
end

-- Whether a client that keeps no mirror tables has been at work: cheap signs of it.
local function strayed()
  if call('HDEL', UPKEEP, 'recount') == 1 then
    return true
  end
  local sizes = { wait = call('LLEN', WAIT) + (tonumber(call('HGET', STATS, 'group_waiting')) or 0),
    active = call('ZCARD', ACTIVE), delayed = call('ZCARD', DELAYED), failed = call('LLEN', FAILED),
    completed = call('LLEN', COMPLETED) }
  for state, size in pairs(sizes) do
    if call('ZCARD', IDX .. state) ~= size then
      return true
    end
  end
  local newest = { wait = call('LINDEX', WAIT, '-1'), completed = call('LINDEX', COMPLETED, '0'),
    failed = call('LINDEX', FAILED, '0'), active = call('ZRANGE', ACTIVE, '-1', '-1')[1] or false }
  for state, id in pairs(newest) do
    if id and not call('ZSCORE', IDX .. state, id) then
      return true
    end
  end
  return false
end

call('HSET', WORKERS, ARGV[2], NOW_S .. ' ' .. ARGV[9])
local reclaimed, buried = reap(BATCH, tonumber(ARGV[3]), true)
local promoted = promote(BATCH)
flush_groups()
local trimmed = 0
local tidies = NOW >= (tonumber(call('HGET', UPKEEP, 'tidy_at')) or 0)
if tidies then
  call('HSET', UPKEEP, 'tidy_at', text[NOW + 10000])
  trimmed = trim_journal(ARGV[4], ARGV[5], ARGV[10], call('HGET', UPKEEP, 'captured'))
  forget(WORKERS, function(value) return tonumber(match(value, '^%d+')) or 0 end)
  forget(CLAIMS, function(value) return cmsgpack.unpack(value).at end)
end
flush()
local mend = (tidies or call('HEXISTS', UPKEEP, 'recount') == 1) and strayed()
return { promoted, reclaimed, buried, 0, trimmed, mend and 1 or 0 }
