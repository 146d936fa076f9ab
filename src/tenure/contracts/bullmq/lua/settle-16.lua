-- Ends leases, each by its own outcome, in one step for the whole batch. An outcome sent again after a lost answer
-- gets the verdict it got before.
-- Most outcomes are plain completions: no history, parent, children or deduplication, and no bound on what is kept.
-- They are settled here. The others are in outcomes.lua, whose functions are made only when there is one. Settling
-- plain completions there as well was measured: 0.77 to 0.82 of the jobs a second, 1.3 times the CPU of Redis.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] worker id  ARGV[3] the worker's token  ARGV[4] its hash
-- ARGV[5] minutes of metrics to keep (0: none)  ARGV[6] jobs that the worker's own rate limiter allows ('' for none)
-- ARGV[7] what is kept of failed jobs that name nothing: count, age_s and limit, joined by tabs
-- ARGV[8..] per outcome: id, fence, kind (complete, retry, bury, snooze, release, cancel, limit, park), value (result
--   JSON or the reason), hash of the result, stacktrace (JSON array, '' to leave it), what is kept of finished jobs
--   (as ARGV[7]), and joined by tabs: token, its hash, delay_ms (of a completion or park: before it is tried again when
--   a child forbids it), attempts, most attempts for the journal, what to do when children are pending (retry, bury),
--   1 for a job that goes to the front, error code
-- Returns per outcome 1 for a plain completion, { verdict, due_ms } or { 'lost', reason }; verdict is the kind,
--   'retry' for a snooze
-- Clauses B-15 B-18 B-19 B-20 B-21 B-22 B-23 B-25 B-26 B-29 B-51
local call, try, match, find, format = redis.call, redis.pcall, string.match, string.find, string.format
local WIDTH, FIRST = 8, 8
local KEEP_ALL = '\t\t'
local answers = {}

local function rare(places)
  -- @include outcomes
  settle_others(places)
end

local ACTIVE, META, EVENTS, PREFIX = KEYS[2], KEYS[6], KEYS[7], ARGV[1]
local clock = call('TIME')
local NOW_S = format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000))
local TAIL = '\t' .. ARGV[2] .. '\t0\t0\t\t\t'
local TOKEN, TOKEN_H = ARGV[3] .. ':', '\t' .. ARGV[4] .. '\t'
local NO_METRICS = ARGV[5] == '0'
local BY_WORKER = ARGV[3] .. '\t' -- how the last argument of an outcome begins that has the worker's own token

-- Keys of another type raise here, before anything is written.
local waiting = call('LLEN', KEYS[1])
if waiting == 0 then
  waiting = call('ZCARD', KEYS[3])
end

local locks, probes, n = {}, {}, 0
for at = FIRST, #ARGV, WIDTH do
  local key = PREFIX .. ARGV[at]
  n = n + 1
  locks[n], probes[2 * n - 1], probes[2 * n] = key .. ':lock', key .. ':dependencies', key .. ':unsuccessful'
end
if n == 0 then
  return answers
end
local holders = call('MGET', unpack(locks))
local with_children = call('EXISTS', unpack(probes)) > 0

local lines, scored, ids, freed, others = {}, {}, {}, {}, {}
local done = 0
n = 0
for at = FIRST, #ARGV, WIDTH do
  n = n + 1
  local id, fence = ARGV[at], ARGV[at + 1]
  answers[n] = 0
  if holders[n] == TOKEN .. fence and find(ARGV[at + 7], BY_WORKER, 1, true) == 1 and not with_children
    and ARGV[at + 2] == 'complete' and ARGV[at + 6] == KEEP_ALL and NO_METRICS then
    local key = PREFIX .. id
    -- The claim wrote `active` for a plain job, and another word for every other.
    local v = try('HMGET', key, 'tn', 'parentKey', 'cancel', 'name', 'priority')
    local ver, lease = match(v[1] or '', '^(%d+) active (%d+) ')
    if ver and #ver < 16 and v[4] and not v[2] and not v[3] and call('LREM', ACTIVE, '-1', id) == 1 then
      ver = format('%.0f', ver + 1)
      local result, task, priority = ARGV[at + 3], v[4], v[5] or '0'
      call('HSET', key, 'atm', '1', 'returnvalue', result, 'finishedOn', NOW_S, 'tn',
        ver .. ' completed 0 ' .. fence .. ' complete 0')
      try('XADD', EVENTS, '*', 'event', 'completed', 'jobId', id, 'returnvalue', result, 'prev',
        'active', 'timestamp', NOW_S)
      -- Names, ids and priorities come from other programs: nothing in them may break the journal's lines.
      if find(task, '%c') then
        task = string.gsub(task, '%c', ' ')
      end
      if priority ~= '0' and (#priority > 16 or find(priority, '%D')) then
        priority = '0'
      end
      done = done + 1
      local shown = find(id, '%c') and string.gsub(id, '%c', ' ') or id
      lines[2 * done - 1], lines[2 * done] = 'e', shown .. '\tcomplete\t' .. ver .. '\t' .. NOW_S .. '\t' .. task
        .. '\tactive\tcompleted\t1\t' .. fence .. '\t' .. fence .. '\t0\t' .. lease .. TAIL .. ARGV[at + 4]
        .. TOKEN_H .. priority .. '\t'
      scored[2 * done - 1], scored[2 * done] = NOW_S, id
      ids[done], freed[done] = id, locks[n]
      answers[n] = 1
    end
  end
  if answers[n] == 0 then
    others[#others + 1] = at
  end
end

if done > 0 then
  call('DEL', unpack(freed))
  try('SREM', KEYS[9], unpack(ids))
  local kept = try('ZADD', KEYS[12], unpack(scored))
  if type(kept) == 'table' and find(kept.err, 'WRONGTYPE', 1, true) then -- put aside, as mend-16.lua does it
    local aside = PREFIX .. 'tenure:quarantine:completed'
    call('RENAME', KEYS[12], aside)
    call('PEXPIRE', aside, '604800000') -- a week
    call('ZADD', KEYS[12], unpack(scored))
  end
  for from = 1, 2 * done, 200 do
    try('XADD', KEYS[16], '*', unpack(lines, from, math.min(from + 199, 2 * done)))
  end
  -- As BullMQ's workers, which emit nothing while jobs wait for their time, a resume or the rate limiter.
  if waiting == 0 and call('LLEN', ACTIVE) == 0 and try('ZCARD', KEYS[4]) == 0 then
    local v = try('HMGET', META, 'paused', 'max')
    local limit_max = tonumber(v[2]) or tonumber(ARGV[6])
    if not v[1] and not (limit_max and (tonumber(try('GET', KEYS[10])) or 0) >= limit_max) then
      try('XADD', EVENTS, '*', 'event', 'drained')
    end
  end
  -- The stream may grow by a batch or two before it is trimmed; a slot of a bounded queue is free again.
  local trims = done > 8 or clock[2] % 16 == 0
  if trims or waiting > 0 then
    local v = call('HMGET', META, 'concurrency', 'opts.maxLenEvents', 'paused')
    if trims then
      try('XTRIM', EVENTS, 'MAXLEN', '~', v[2] or '10000')
    end
    if v[1] and waiting > 0 and not v[3] and call('LLEN', ACTIVE) < (tonumber(v[1]) or math.huge) then
      try('ZADD', KEYS[8], '0', '0')
    end
  end
end
if #others > 0 then
  -- This may raise and the script be repeated: the outcomes above then get their verdict as ones that are sent again.
  rare(others)
end
return answers
