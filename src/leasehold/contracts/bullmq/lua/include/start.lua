-- Starts a job that was just taken: its lock, its event, its hash, its line of the journal, its lease.
-- ARGV[2] token  ARGV[3] worker id, a blank and its name if it has one  ARGV[4] limit  ARGV[5] lease_ms  ARGV[6] how often a lease may run
-- out  ARGV[9] hash of the token
local TOKEN, WORKER, NAME = ARGV[2], match(ARGV[3], '^(%S+) ?(.*)$')
NAME = NAME ~= '' and NAME or WORKER
local LIMIT, LEASE_S = tonumber(ARGV[4]), ARGV[5]
local TOKEN_H = ARGV[9]
local LEASE_UNTIL = text[NOW + tonumber(LEASE_S)]
-- The word tells complete-16.lua what it can settle: a job without history, parent or deduplication.
local PLAIN, OTHER = ' active ' .. LEASE_UNTIL .. ' ', ' running ' .. LEASE_UNTIL .. ' '

local leases, leases_n, started = {}, 0, {}
local counted_starts = 0
-- B-54: a job whose lease ran out this often is taken alone: if it kills its worker, no neighbour is lost
-- with it. `alone` says that nothing more may be taken.
local ALONE_FROM = math.max(1, tonumber(ARGV[6]) - 1)
local alone = false

local function read(key)
  local flat = call('HGETALL', key)
  local f = {}
  for i = 1, #flat, 2 do
    f[flat[i]] = flat[i + 1]
  end
  return f
end

local function lend(id, f, ats)
  leases_n = leases_n + 1
  local row = { id, f.name, f.data or 'null', f.opts or '{}', ats, f.timestamp or '0', f.priority or '0' }
  if f.atm or f.stc or f.rjk or f.defa then
    row[8], row[9], row[10] = f.atm or '0', f.stc or '0', f.stacktrace or ''
    row[11], row[12] = f.rjk or '', f.defa or ''
  end
  leases[leases_n] = row
end

-- False, and nothing done, for a suspect that has to wait because others were taken before it.
local function start(id, from_list)
  local key = PREFIX .. id
  local f = read(key)
  local name = f.name
  if not name then
    return true -- removed while it waited
  end
  if f.stc and not f.defa and tonumber(f.stc) >= ALONE_FROM then
    alone = true
    if leases_n > 0 then
      return false
    end
  end
  local was_fence = f.ats or '0'
  local ats = was_fence == '0' and '1' or text[was_fence + 1]
  local ver, from, was_lease, old_fence, old_kind, old_due = read_lh(f.lh)
  local priority = f.priority or '0'
  if find(name, '%c') then
    name = string.gsub(name, '%c', ' ')
  end
  if ver == 0 then -- another program stored it: its history begins with what it left
    ver, from = 1, from_list
    lines[lines_n + 1] = 'e'
    lines_n = lines_n + 2
    lines[lines_n] = id .. '\tsubmit\t1\t' .. (f.timestamp or NOW_S) .. '\t' .. name .. '\t\t' .. from
      .. '\t0\t' .. was_fence .. '\t0\t0\t0\t\t0\t0\t\t\t\t\t' .. priority .. '\tseen at its first claim'
  elseif from ~= 'delayed' then -- due jobs are promoted without an event of their own
    from = from_list
  end
  ver = ver == 1 and '2' or text[ver + 1]
  local is_plain = not (f.atm or f.stc or f.deid or f.parentKey)
  call('SET', key .. ':lock', TOKEN .. ':' .. ats, 'PX', LEASE_S)
  call('XADD', EVENTS, '*', 'event', 'active', 'jobId', id, 'prev', 'waiting', 'timestamp', NOW_S,
    'workerId', WORKER)
  call('HSET', key, 'processedOn', NOW_S, 'ats', ats, 'pb', NAME, 'workerId', WORKER, 'lh',
    ver .. (is_plain and PLAIN or OTHER) .. old_fence .. ' ' .. old_kind .. ' ' .. old_due)
  local attempt = (f.atm or f.stc) and text[(f.atm or 0) + (f.stc or 0) + 1] or '1'
  lines[lines_n + 1] = 'e'
  lines_n = lines_n + 2
  lines[lines_n] = id .. '\tclaim\t' .. ver .. '\t' .. NOW_S .. '\t' .. name .. '\t' .. from
    .. '\tactive\t' .. attempt .. '\t' .. ats .. '\t' .. was_fence .. '\t' .. LEASE_UNTIL .. '\t'
    .. was_lease .. '\t' .. WORKER .. '\t0\t0\t\t\t\t' .. TOKEN_H .. '\t' .. priority .. '\t'
  if not f.defa then -- B-17: its worker fails it at once; no start for the rate limiter
    counted_starts = counted_starts + 1
  end
  started[#started + 1] = id
  lend(id, f, ats)
  return true
end

-- Starts jobs that were popped, `step` words a job, in their order; returns where the rest begins that
-- must go back to its place.
local function start_each(popped, step, from_list)
  for at = 1, #popped, step do
    if not start(popped[at], from_list) then
      return at
    elseif alone then
      return at + step
    end
  end
  return #popped + 1
end

-- Takes up to `wanted` jobs off the lines; returns whether they are empty now.
local function take_from_lines(wanted)
  while leases_n < wanted and not alone do
    local asked = wanted - leases_n
    local ids = call('RPOP', WAIT, text[asked]) or {}
    local rest = start_each(ids, 1, 'waiting')
    for i = #ids, rest, -1 do
      call('RPUSH', WAIT, ids[i])
    end
    if #ids < asked and not alone then
      local popped = call('ZPOPMIN', PRIORITIZED, text[wanted - leases_n])
      if #popped == 0 then
        call('DEL', PC)
        return true
      end
      for i = start_each(popped, 2, 'prioritized'), #popped, 2 do
        call('ZADD', PRIORITIZED, popped[i + 1], popped[i])
      end
    end
  end
  return false
end
