-- Promotes due jobs, takes back expired leases, trims the journal, deletes workers that have been silent for long.
-- Every worker may call it; each part does a limited amount of work.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] worker id: the call shows that it is alive
-- ARGV[3] random number for jitter
-- ARGV[4] journal size in bytes  ARGV[5] journal age in ms  ARGV[6] age in ms at which workers are deleted
-- ARGV[7] completed jobs to keep  ARGV[8] failed jobs to keep  ARGV[9] slots of the worker
-- ARGV[10] age in ms to which journal that is not captured yet is kept
-- Returns { promoted, reclaimed, buried, expired, trimmed, 1 if the tables need repair, quarantined };
--   quarantined: 'id\nreason' of each record
-- Clauses O-21 O-22 O-39 O-51
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
-- @include outcome
-- @include due
KEEP_COMPLETED, KEEP_FAILED = tonumber(ARGV[7]), tonumber(ARGV[8])
local UPKEEP, WORKERS = BASE .. ':upkeep', BASE .. ':workers'
-- @include trim
local BATCH, TIDY_MS, RECOUNT_MS = 200, 10000, 2000

local function forget(key, at_of)
  local all = call('HGETALL', key)
  for i = 1, #all, 2 do
    if NOW - at_of(all[i + 1]) > tonumber(ARGV[6]) then
      call('HDEL', key, all[i])
    end
  end
end

-- Whether the tables need repair, by cheap signs: OmniQ 1.x changes jobs without updating the index tables.
local function needs_repair()
  if call('HEXISTS', UPKEEP, 'recount') == 1 then
    return true
  end
  local grouped = figure(call('HGET', STATS, 'group_waiting'), 0) or 0
  local sizes = { wait = call('LLEN', WAIT) + grouped,
    active = call('ZCARD', ACTIVE), delayed = call('ZCARD', DELAYED), failed = call('LLEN', FAILED),
    completed = call('LLEN', COMPLETED) }
  for state, size in pairs(sizes) do
    if call('ZCARD', IDX .. state) ~= size then
      return true
    end
  end
  if grouped > 0 and sizes.active == 0 and call('EXISTS', READY) == 0 then
    return true -- no job runs, but no group has a free slot: a count is wrong
  end
  for _, key in ipairs({ ACTIVE, DELAYED }) do
    if call('ZCOUNT', key, '9e15', '+inf') > 0 then
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
local tidy_at = figure(call('HGET', UPKEEP, 'tidy_at'), 0) or 0
local tidies = NOW >= tidy_at or tidy_at > NOW + TIDY_MS
if tidies then
  call('HSET', UPKEEP, 'tidy_at', text[NOW + TIDY_MS])
  local captured = call('HGET', UPKEEP, 'captured')
  captured = captured and figure(match(captured, '^%d+')) and captured
  trimmed = trim_journal(ARGV[4], ARGV[5], ARGV[10], captured)
  forget(WORKERS, function(value) return figure(match(value, '^%d+'), 0) or 0 end)
  forget(CLAIMS, function(value) return (claim_of(value) or { at = 0 }).at end)
end
flush()
-- One worker repairs, and not all the time: OmniQ 1.x leaves something to repair with every step.
local since = NOW - (figure(call('HGET', UPKEEP, 'mended_at'), 0) or 0)
local pause = call('HEXISTS', UPKEEP, 'recount') == 1 and RECOUNT_MS or TIDY_MS
local mend = (since < 0 or since >= pause) and needs_repair()
if mend then
  call('HSET', UPKEEP, 'mended_at', NOW_S)
end
return { promoted, reclaimed, buried, 0, trimmed, mend and 1 or 0,
  call('LPOP', BASE .. ':quarantine:new', '100') or {} }
