-- Promotes what is due, takes back leases that ran out, trims journal and index, forgets consumers
-- that are long gone. Every worker may call it; each part is bounded and guarded by its own predicate.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] lease_ms  ARGV[3] how often a lease may run out
-- ARGV[4] journal size in bytes  ARGV[5] journal age in ms  ARGV[6] consumer age in ms
-- ARGV[7] who asks: every worker does so about once a second, and is seen to be alive by it
-- ARGV[8] how many jobs it runs at once (0: not told)  ARGV[9] age in ms of journal that is captured later
-- Returns { promoted, reclaimed, buried, expired, trimmed }
-- Clauses S-12 S-13 S-19 S-29 S-30
-- @include job
-- @include end
-- @include enqueue
-- @include promote
-- @include reap
-- @include trim
local LOST_MAX = tonumber(ARGV[3])
local reclaimed, ended = 0, 0

local function take_back(msg_id)
  local entry = call('XRANGE', STREAM, msg_id, msg_id)[1]
  if not entry then
    return call('XACK', STREAM, GROUP, msg_id)
  end
  local id, task = fields_of(entry[2])
  local job = read_job(id)
  if not job then
    expire(id, task, msg_id)
  elseif FINAL[job.status] then
    drop_entry(msg_id)
  elseif job.status == 'running' and tonumber(job.lease_until) <= NOW then
    reclaimed = reclaimed + 1
    if reap(job, task, LOST_MAX) then
      call('HSET', job.key, 'status', 'queued', 'updated_ts', NOW_S, 'lease', lease_words(job))
    else
      ended = ended + 1
      drop_entry(msg_id)
    end
  end
end

-- Index members whose job has expired, oldest first, a bounded number at a time.
local function forget_expired()
  for _, id in ipairs(call('ZRANGE', INDEX, '0', '199')) do
    if call('EXISTS', job_key(id)) == 0 then
      call('ZREM', INDEX, id)
    end
  end
end

local function forget_workers()
  local all = call('HGETALL', WORKERS)
  for i = 1, #all, 2 do
    if NOW - (tonumber(match(all[i + 1], '^%d+')) or 0) > tonumber(ARGV[6]) then
      call('HDEL', WORKERS, all[i])
    end
  end
end

local function forget_consumers()
  for _, flat in ipairs(call('XINFO', 'CONSUMERS', STREAM, GROUP)) do
    local consumer = {}
    for i = 1, #flat, 2 do
      consumer[flat[i]] = flat[i + 1]
    end
    if consumer['pending'] == 0 and consumer['idle'] > tonumber(ARGV[6]) then
      call('XGROUP', 'DELCONSUMER', STREAM, GROUP, consumer['name'])
    end
  end
end

local claimed = match(call('HGET', WORKERS, ARGV[7]) or '', '^%d+ (%S+ %d+ %S+)')
call('HSET', WORKERS, ARGV[7], NOW_S .. ' ' .. (claimed or '- 0 -') .. ' ' .. ARGV[8])
ensure_group()
local promoted = promote('1000')
each_idle(ARGV[2], take_back)
if reclaimed > ended then
  call('HSET', UPKEEP, 'search_at', '0')
  wake()
end
local trimmed = 0
if NOW >= (tonumber(call('HGET', UPKEEP, 'tidy_at')) or 0) then
  call('HSET', UPKEEP, 'tidy_at', text[NOW + 10000])
  trimmed = trim_journal(ARGV[4], ARGV[5], ARGV[9], call('HGET', UPKEEP, 'captured'))
  forget_workers()
  forget_expired()
  forget_consumers()
end
local expired, buried = counted['expired'] or 0, counted['error'] or 0
flush()
return { promoted, reclaimed, buried, expired, trimmed }
