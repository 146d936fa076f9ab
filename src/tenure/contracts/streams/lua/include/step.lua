-- What every step does, however common: the keys in their fixed order, the store's clock, the job's own
-- event with its time to live, the journal and the counters.
-- ARGV[1] is the namespace that stands before every key ('' for the contract's exact names).
--
-- A script pays for each function it makes before it calls one: what the common cases do not need is
-- not here but in job.lua, which they include inside a function that is called only when it is needed.
local STREAM, JOURNAL, DELAYED, WAKE = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local UPKEEP, STATS, INDEX, PAUSED, WORKERS = KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local NS = ARGV[1]
local JOB = NS .. 'job:'
local GROUP = 'workers'
local call, pcall, match, format = redis.call, redis.pcall, string.match, string.format
local clock = call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)
local NOW_S = format('%s%03d', clock[1], clock[2] / 1000)
local counted = {}
-- @include quarantine

-- When keys with this time to live go if nothing more happens. The moment and not the time to live is
-- told: Redis would write the command anew for its followers, once a key and step.
-- False for what is no time: another program may have written the field, and its job must not stop the
-- script for all others.
local ends = {}
local TTL_S_MAX = 1e10
-- A running job outlives its lease by this, whatever its time to live: another worker must find it.
local RUNNING_MS = 60000

-- `lease_until` is given for jobs that run.
local function end_of(ttl_s, lease_until)
  local at = ends[ttl_s]
  if at == nil then
    local seconds = tonumber(ttl_s)
    at = seconds and seconds >= 1 and seconds <= TTL_S_MAX and format('%d', NOW + seconds * 1000) or false
    ends[ttl_s] = at
  end
  if at and lease_until and tonumber(at) < lease_until + RUNNING_MS then
    return format('%d', lease_until + RUNNING_MS)
  end
  return at
end

-- S-7: every event gives the job and its stream their whole time to live again.
local function emit(key, kind, step, data, ttl_s, lease_until)
  local events = key .. ':events'
  local added = pcall('XADD', events, '*', 'type', kind, 'ts', NOW_S, 'step', step, 'data', data)
  if added.err then
    quarantine().emit_anew(key, added.err, '*', 'type', kind, 'ts', NOW_S, 'step', step, 'data', data)
  end
  local at = ttl_s and end_of(ttl_s, lease_until)
  if at then
    call('PEXPIREAT', key, at)
    call('PEXPIREAT', events, at)
  end
end

-- The journal. Events gather while a script runs and leave as one entry at its end, so that history
-- costs a text and not a command; what happened first stands first. `lines` alternates field name and
-- event; store/journal.py reads it.
local lines = {}
local lines_n = 0
-- Jobs to which the same happens one after the other are noted together: once what happened, then their
-- ids as one text, joined by what ends an id in a line too. A line of its own for each would be a text
-- that nobody else has, and Redis pays for every field.
local run = {}
local run_n = 0
local run_tail
local RUN_LEAST, RUN_MOST = 5, 100

local function flush_lines()
  for from = 1, lines_n, 200 do
    own('XADD', JOURNAL, '*', unpack(lines, from, math.min(from + 199, lines_n)))
  end
  lines_n = 0
end

local function end_run()
  if run_n >= RUN_LEAST then
    flush_lines()
    own('XADD', JOURNAL, '*', 's', run_tail, 'ids', table.concat(run, '\t', 1, run_n))
  else
    for at = 1, run_n do
      lines[lines_n + 1], lines[lines_n + 2] = 'e', run[at] .. run_tail
      lines_n = lines_n + 2
    end
  end
  run_n = 0
end

local function add_line(line)
  if run_n > 0 then
    end_run()
  end
  lines[lines_n + 1], lines[lines_n + 2] = 'e', line
  lines_n = lines_n + 2
end

-- From here on ids that are put into `run` (as `run_n` counts them) have lines that end in `tail`.
local function begin_run(tail)
  if run_n >= RUN_MOST or run_tail ~= tail then
    end_run()
    run_tail = tail
  end
end

-- Every script ends here: what it noted and counted is written.
local function flush()
  if run_n > 0 then
    end_run()
  end
  flush_lines()
  while next(counted) do -- a key that is set aside here is counted too
    local totals = counted
    counted = {}
    for name, n in pairs(totals) do
      own('HINCRBY', STATS, name, format('%d', n))
    end
  end
end
