-- Promotes due jobs, takes back expired leases, trims journal and index, deletes consumers and workers that have been
-- silent for long. Every worker may call it: each part checks its own condition and does a limited amount of work.
-- KEYS[1] jobs:stream  KEYS[2] jobs:journal  KEYS[3] jobs:delayed  KEYS[4] jobs:wake
-- KEYS[5] jobs:upkeep  KEYS[6] jobs:stats    KEYS[7] jobs:index    KEYS[8] jobs:paused
-- KEYS[9] jobs:workers
-- ARGV[1] namespace  ARGV[2] lease_ms  ARGV[3] how often a lease may expire
-- ARGV[4] journal size in bytes  ARGV[5] journal age in ms  ARGV[6] consumer age in ms
-- ARGV[7] worker id: about one call a second shows that the worker is alive
-- ARGV[8] its slots (0: unknown)  ARGV[9] age in ms to which journal that is not captured yet is kept
-- ARGV[10] for how long a foreign worker may be silent, in ms
-- Returns { promoted, reclaimed, buried, expired, trimmed, quarantined records as { job_id, reason, ... } }
-- Clauses S-12 S-13 S-19 S-29 S-30
-- @include job
-- @include end
-- @include reap
-- @include trim
local LOST_MAX = tonumber(ARGV[3])
local FOREIGN_MS = tonumber(ARGV[10])
local JOB_PATTERN = string.gsub(JOB, '[%*%?%[%]\\]', '\\%0') .. '*'
local reclaimed, ended = 0, 0

local function take_back(msg_id, consumer, idle_ms)
  local entry = call('XRANGE', STREAM, msg_id, msg_id)[1]
  if not entry then
    return call('XACK', STREAM, GROUP, msg_id)
  end
  local id, task = fields_of(entry[2])
  local job, unreadable = read_job(id)
  if unreadable then
    quarantine_job(id, msg_id, unreadable, entry[2])
  elseif not job then
    expire(id, task, msg_id)
  elseif FINAL[job.status] then
    drop_entry(msg_id)
  elseif job.status == 'running' and not is_held(job, consumer, idle_ms, FOREIGN_MS) then
    reclaimed = reclaimed + 1
    if reap(job, task, LOST_MAX) then
      call('HSET', job.key, 'status', 'queued', 'updated_ts', NOW_S, 'lease', lease_field(job))
      hand_back(msg_id, consumer)
    else
      ended = ended + 1
      drop_entry(msg_id)
    end
  end
end

-- Puts a job back into the stream or the delayed set if its entry was lost. A running job gets an entry too, so that
-- it is found if its worker dies. A due time that differs from the one in the hash was written by another program.
local function restore_entry(job)
  local due = 0
  if job.msg_id ~= '-' and has_entry(job.msg_id) or job.msg_id == '-' and job.status == 'running' then
    return
  elseif job.msg_id == '-' then
    local score = own('ZSCORE', DELAYED, job.id)
    due = whole(call('HGET', job.key, 'due_ms')) or whole(score) or 0
    if score and tonumber(score) == due then
      return
    end
    call('ZREM', DELAYED, job.id)
  end
  local v = call('HMGET', job.key, 'task', 'payload')
  job.msg_id = enqueue(job.id, v[1] or '', v[2] or '', due)
  call('HSET', job.key, 'entry', entry_field(job))
end

-- Repairs one job. A finished job only needs its place in the index. Jobs that our scripts never changed (ver 0) are
-- left alone, because it is not known where they should be.
local function repair_job(key, index_lost)
  local status = call('HGET', key, 'status')
  if not index_lost and not WAITS_OR_RUNS[status] then
    return
  end
  local job = read_job(string.sub(key, #JOB + 1))
  if job and job.ver > 0 then
    if index_lost then
      own('ZADD', INDEX, 'NX', job.created_ts, job.id)
    end
    if not FINAL[job.status] then
      restore_entry(job)
    end
  end
end

-- Scans the jobs' hashes, the only complete list of jobs. All workers together scan a fifth of all keys, at most 3,000,
-- once a second. After a key of the queue was lost, every upkeep scans a larger part.
local function repair()
  local v = own('HMGET', UPKEEP, 'repair', 'repair_all', 'repair_at')
  local repair_at = whole(v[3]) or 0
  if not v[2] and NOW < repair_at and repair_at <= NOW + 1000 then
    return
  end
  local cursor = match(v[1] or '', '^%d+$') and #v[1] < 20 and v[1] or '0'
  local count = v[2] == 'index' and '500' or v[2] and '4000'
    or text[math.max(500, math.min(3000, math.ceil(call('DBSIZE') / 5)))]
  local scan = pcall('SCAN', cursor, 'MATCH', JOB_PATTERN, 'COUNT', count, 'TYPE', 'hash')
  for _, key in ipairs(scan[2] or {}) do
    repair_job(key, v[2] == 'index')
  end
  cursor = scan[1] or '0'
  call('HSET', UPKEEP, 'repair', cursor, 'repair_at', text[NOW + 1000])
  if cursor == '0' then
    call('HDEL', UPKEEP, 'repair_all')
  end
end

-- Removes index members whose job has expired, oldest first, a limited number at a time.
local function forget_expired()
  for _, id in ipairs(own('ZRANGE', INDEX, '0', '199')) do
    if call('EXISTS', job_key(id)) == 0 then
      call('ZREM', INDEX, id)
    end
  end
end

local function forget_workers()
  local all = call('HGETALL', WORKERS)
  for i = 1, #all, 2 do
    if math.abs(NOW - (tonumber(match(all[i + 1], '^%d+')) or 0)) > tonumber(ARGV[6]) then
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

local claimed = match(own('HGET', WORKERS, ARGV[7]) or '', '^%d+ (%S+ %d+ %S+)')
call('HSET', WORKERS, ARGV[7], NOW_S .. ' ' .. (claimed or '- 0 -') .. ' ' .. ARGV[8])
ensure_group()
local promoted = promote('1000')
each_idle('upkeep_from', ARGV[2], take_back)
repair()
if reclaimed > ended then
  own('HSET', UPKEEP, 'search_at', '0')
  wake()
end
local trimmed = 0
local tidy_at = tonumber(own('HGET', UPKEEP, 'tidy_at')) or 0
if not (NOW < tidy_at and tidy_at <= NOW + 10000) then
  own('XLEN', JOURNAL)
  call('HSET', UPKEEP, 'tidy_at', text[NOW + 10000])
  trimmed = trim_journal(ARGV[4], ARGV[5], ARGV[9], call('HGET', UPKEEP, 'captured'))
  forget_workers()
  forget_expired()
  forget_consumers()
end
local expired, buried = counted['expired'] or 0, counted['error'] or 0
flush()
return { promoted, reclaimed, buried, expired, trimmed, quarantined }
