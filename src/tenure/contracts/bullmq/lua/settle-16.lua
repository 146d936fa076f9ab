-- Ends leases, each by its own outcome, in one step for the whole batch. An outcome that is sent again after a lost
-- reply gets the same verdict as before.
-- Most outcomes are plain completions: the job has no history, parent, children or deduplication, and no bound on the
-- finished jobs to keep. This file settles those. outcome.lua settles all others; its functions are defined only when
-- a batch has one. Without this fast path throughput falls to 77-82 % and the CPU time of Redis is 1.3 times as high
-- (2026-11-17).
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] worker id  ARGV[3] the worker's token  ARGV[4] its hash
-- ARGV[5] minutes of metrics to keep (0: none)  ARGV[6] jobs that the worker's own rate limiter allows ('' for none)
-- ARGV[7] how many failed jobs to keep if a job's options do not say: count, age_s and limit, joined by tabs
-- ARGV[8..] per outcome: id, fence, kind (complete, retry, bury, snooze, release, cancel, limit, park), value (result
--   JSON or the reason), hash of the result, stacktrace (JSON array, '' to leave it), how many finished jobs to keep
--   (as ARGV[7]), and joined by tabs: token, its hash, delay_ms (of a completion or park: the delay before the retry
--   if a child forbids it), attempts, max_attempts for the journal, what to do if children are pending (retry, bury),
--   1 for a lifo job, error code
-- Returns per outcome 1 for a plain completion, { verdict, due_ms } or { 'lost', reason }; verdict is the kind,
--   'retry' for a snooze
-- Clauses B-15 B-18 B-19 B-20 B-21 B-22 B-23 B-25 B-26 B-29 B-51
local call, try, match, find, format = redis.call, redis.pcall, string.match, string.find, string.format
local WIDTH, FIRST = 8, 8
local KEEP_ALL = '\t\t'
local answers = {}

local ACTIVE, META, EVENTS, JOURNAL, PREFIX = KEYS[2], KEYS[6], KEYS[7], KEYS[16], ARGV[1]
-- @include journal

local function settle_others(positions)
  -- @include outcome
  settle_all(positions)
end

local clock = call('TIME')
local NOW_S = format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000))
local TAIL = '\t' .. ARGV[2] .. '\t0\t0\t\t\t'
local TOKEN, TOKEN_H = ARGV[3] .. ':', '\t' .. ARGV[4] .. '\t'
local NO_METRICS = ARGV[5] == '0'
local BY_WORKER = ARGV[3] .. '\t' -- the last argument of an outcome under the worker's own token begins with this

-- Raises here, before anything is written, if a key has another type.
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

local scores, ids, freed_locks, others = {}, {}, {}, {}
local done = 0
n = 0
for at = FIRST, #ARGV, WIDTH do
  n = n + 1
  local id, fence, kind, result, result_h, _, keep, rest = unpack(ARGV, at, at + WIDTH - 1)
  answers[n] = 0
  if holders[n] == TOKEN .. fence and find(rest, BY_WORKER, 1, true) == 1 and not with_children
    and kind == 'complete' and keep == KEEP_ALL and NO_METRICS then
    local key = PREFIX .. id
    -- The claim writes the state `active` for plain jobs only.
    local v = try('HMGET', key, 'tn', 'parentKey', 'cancel', 'name', 'priority')
    local ver, lease = match(v[1] or '', '^(%d+) active (%d+) ')
    if ver and #ver < 16 and v[4] and not v[2] and not v[3] and call('LREM', ACTIVE, '-1', id) == 1 then
      ver = format('%.0f', ver + 1)
      local task, priority = v[4], v[5] or '0'
      call('HSET', key, 'atm', '1', 'returnvalue', result, 'finishedOn', NOW_S, 'tn',
        ver .. ' completed 0 ' .. fence .. ' complete 0')
      try('XADD', EVENTS, '*', 'event', 'completed', 'jobId', id, 'returnvalue', result, 'prev',
        'active', 'timestamp', NOW_S)
      -- Names, ids and priorities come from other programs: a control character would break the lines of the journal.
      if find(task, '%c') then
        task = string.gsub(task, '%c', ' ')
      end
      if priority ~= '0' and (#priority > 16 or find(priority, '%D')) then
        priority = '0'
      end
      done = done + 1
      local shown = find(id, '%c') and string.gsub(id, '%c', ' ') or id
      add_line(shown, '\tcomplete\t' .. ver .. '\t' .. NOW_S .. '\t' .. task .. '\tactive\tcompleted\t1\t' .. fence
        .. '\t' .. fence .. '\t0\t' .. lease .. TAIL .. result_h .. TOKEN_H .. priority .. '\t')
      scores[2 * done - 1], scores[2 * done] = NOW_S, id
      ids[done], freed_locks[done] = id, locks[n]
      answers[n] = 1
    end
  end
  if answers[n] == 0 then
    others[#others + 1] = at
  end
end

if done > 0 then
  call('DEL', unpack(freed_locks))
  try('SREM', KEYS[9], unpack(ids))
  local added = try('ZADD', KEYS[12], unpack(scores))
  if type(added) == 'table' and find(added.err, 'WRONGTYPE', 1, true) then -- renamed, as mend-16.lua does it
    local renamed = PREFIX .. 'tenure:quarantine:completed'
    call('RENAME', KEYS[12], renamed)
    call('PEXPIRE', renamed, '604800000') -- a week
    call('ZADD', KEYS[12], unpack(scores))
  end
  flush_journal(try)
  -- B-19, as BullMQ's workers do it: no event while jobs wait for their time, a resume or the rate limiter.
  if waiting == 0 and call('LLEN', ACTIVE) == 0 and try('ZCARD', KEYS[4]) == 0 then
    local v = try('HMGET', META, 'paused', 'max')
    local limit_max = tonumber(v[2]) or tonumber(ARGV[6])
    if not v[1] and not (limit_max and (tonumber(try('GET', KEYS[10])) or 0) >= limit_max) then
      try('XADD', EVENTS, '*', 'event', 'drained')
    end
  end
  -- The event stream may grow by a batch or two before it is trimmed.
  local trims = done > 8 or clock[2] % 16 == 0
  if trims or waiting > 0 then
    local v = call('HMGET', META, 'concurrency', 'opts.maxLenEvents', 'paused')
    if trims then
      try('XTRIM', EVENTS, 'MAXLEN', '~', v[2] or '10000')
    end
    -- B-14: a slot of a queue with a global concurrency is free again.
    if v[1] and waiting > 0 and not v[3] and call('LLEN', ACTIVE) < (tonumber(v[1]) or math.huge) then
      try('ZADD', KEYS[8], '0', '0')
    end
  end
end
if #others > 0 then
  -- If this raises, the caller repeats the script. The completions above then get the same verdict as before (B-26).
  settle_others(others)
end
return answers
