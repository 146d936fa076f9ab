-- Ends leases of plain jobs with their results, in one step: no parent, no children, no deduplication,
-- nothing asked of the job's keeping. That is most of all settles, so this script is flat and defines
-- nothing it does not run; whatever is not plain is left untouched for settle-16.lua.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] worker id  ARGV[3] token  ARGV[4] hash of the token
-- ARGV[5] jobs that the worker's own rate limiter allows ('' for none)
-- ARGV[6..] per outcome: id, fence, result JSON, hash of the result, task, priority
-- Returns per outcome 1 when it is done, 0 when it is not plain
-- Clauses B-18 B-19 B-26
local call, pcall, match, find, format = redis.call, redis.pcall, string.match, string.find, string.format
local ACTIVE, META, EVENTS, PREFIX = KEYS[2], KEYS[6], KEYS[7], ARGV[1]
local clock = call('TIME')
local NOW_S = format('%.0f', clock[1] * 1000 + math.floor(clock[2] / 1000))
local TAIL = '\t' .. ARGV[2] .. '\t0\t0\t\t\t'
local TOKEN, TOKEN_H = ARGV[3] .. ':', '\t' .. ARGV[4] .. '\t'
local WIDTH, FIRST = 6, 6

-- Keys of another type raise here, before anything is written.
local waiting = call('LLEN', KEYS[1])
if waiting == 0 then
  waiting = call('ZCARD', KEYS[3])
end

local locks, probes = {}, {}
local n = 0
for at = FIRST, #ARGV, WIDTH do
  local key = PREFIX .. ARGV[at]
  n = n + 1
  locks[n], probes[2 * n - 1], probes[2 * n] = key .. ':lock', key .. ':dependencies', key .. ':unsuccessful'
end
local holders = call('MGET', unpack(locks))
local with_children = call('EXISTS', unpack(probes)) > 0

local answers, lines, scored, ids, freed = {}, {}, {}, {}, {}
local done = 0
n = 0
for at = FIRST, #ARGV, WIDTH do
  n = n + 1
  answers[n] = 0
  local id, fence = ARGV[at], ARGV[at + 1]
  if holders[n] == TOKEN .. fence and not with_children then
    local key = PREFIX .. id
    -- The claim wrote `active` for a plain job, and another word for every other.
    local v = pcall('HMGET', key, 'tn', 'parentKey', 'cancel')
    local ver, lease = match(v[1] or '', '^(%d+) active (%d+) ')
    if ver and #ver < 16 and not v[2] and not v[3] and call('LREM', ACTIVE, '-1', id) == 1 then
      ver = format('%.0f', ver + 1)
      local result, task = ARGV[at + 2], ARGV[at + 4]
      call('HSET', key, 'atm', '1', 'returnvalue', result, 'finishedOn', NOW_S, 'tn',
        ver .. ' completed 0 ' .. fence .. ' complete 0')
      pcall('XADD', EVENTS, '*', 'event', 'completed', 'jobId', id, 'returnvalue', result, 'prev',
        'active', 'timestamp', NOW_S)
      if find(task, '%c') then
        task = string.gsub(task, '%c', ' ')
      end
      done = done + 1
      lines[2 * done - 1], lines[2 * done] = 'e', (find(id, '%c') and string.gsub(id, '%c', ' ') or id) .. '\tcomplete\t' .. ver .. '\t' .. NOW_S .. '\t'
        .. task .. '\tactive\tcompleted\t1\t' .. fence .. '\t' .. fence .. '\t0\t' .. lease .. TAIL
        .. ARGV[at + 3] .. TOKEN_H .. ARGV[at + 5] .. '\t'
      scored[2 * done - 1], scored[2 * done] = NOW_S, id
      ids[done], freed[done] = id, locks[n]
      holders[n] = false
      answers[n] = 1
    end
  end
end
if done == 0 then
  return answers
end
call('DEL', unpack(freed))
pcall('SREM', KEYS[9], unpack(ids))
local kept = pcall('ZADD', KEYS[12], unpack(scored))
if type(kept) == 'table' and find(kept.err, 'WRONGTYPE', 1, true) then -- put aside, as mend-16.lua does it
  local aside = PREFIX .. 'tenure:quarantine:completed'
  call('RENAME', KEYS[12], aside)
  call('PEXPIRE', aside, '604800000') -- a week
  call('ZADD', KEYS[12], unpack(scored))
end
for from = 1, 2 * done, 200 do
  pcall('XADD', KEYS[16], '*', unpack(lines, from, math.min(from + 199, 2 * done)))
end
-- As BullMQ's workers, which emit nothing while jobs wait for their time, a resume or the rate limiter.
if waiting == 0 and call('LLEN', ACTIVE) == 0 and pcall('ZCARD', KEYS[4]) == 0 then
  local v = pcall('HMGET', META, 'paused', 'max')
  local limit_max = tonumber(v[2]) or tonumber(ARGV[5])
  if not v[1] and not (limit_max and (tonumber(pcall('GET', KEYS[10])) or 0) >= limit_max) then
    pcall('XADD', EVENTS, '*', 'event', 'drained')
  end
end
-- The stream may grow by a batch or two before it is trimmed; a slot of a bounded queue is free again.
if done > 8 or clock[2] % 16 == 0 or waiting > 0 then
  local v = call('HMGET', META, 'concurrency', 'opts.maxLenEvents', 'paused')
  if done > 8 or clock[2] % 16 == 0 then
    pcall('XTRIM', EVENTS, 'MAXLEN', '~', v[2] or '10000')
  end
  if v[1] and waiting > 0 and not v[3] and call('LLEN', ACTIVE) < (tonumber(v[1]) or math.huge) then
    pcall('ZADD', KEYS[8], '0', '0')
  end
end
return answers
