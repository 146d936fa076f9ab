-- Keeps leases: the lock gets its whole time again. Writes only when a third of the lease is spent.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] worker id  ARGV[3] lease_ms
-- ARGV[4..] per lease: id, fence, token, attempt, hash of the token
-- Returns per lease { 'ok', lease_until_ms, 1 if a cancel was asked for, ms left } or { 'lost', reason }
-- Clauses B-18 B-28
-- @include queue
local WORKER, LEASE_S, LEASE_MS = ARGV[2], ARGV[3], tonumber(ARGV[3])
local answers, kept = {}, {}

local function extend(at)
  local id, fence, token = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local key = PREFIX .. id
  local lock = redis.pcall('GET', key .. ':lock')
  local v = redis.pcall('HMGET', key, 'tn', 'cancel', 'name', 'priority')
  if lock ~= token .. ':' .. fence or not v[3] then
    local _, state = read_tn(v[1])
    note({ id = id, kind = 'reject', task = v[3], from = state, to = state, fence = fence, prev_fence = '0',
      worker = WORKER, error = 'lease_lost', token_h = ARGV[at + 4], data = 'extend' })
    return { 'lost', lock and 'another worker holds the job' or 'the lock has run out' }
  end
  local ver, _, lease, old_fence, old_kind, old_due = read_tn(v[1])
  local state = find(v[1] or '', ' active ', 1, true) and 'active' or 'running'
  local left = tonumber(lease) - NOW
  local cancel = v[2] == '1' and 1 or 0
  if left > LEASE_MS * 2 / 3 and left <= LEASE_MS then
    return { 'ok', tonumber(lease), cancel, left }
  end
  local lease_until = text[NOW + LEASE_MS]
  call('SET', key .. ':lock', lock, 'PX', LEASE_S)
  call('HSET', key, 'tn', text[ver + 1] .. ' ' .. state .. ' ' .. lease_until .. ' ' .. old_fence .. ' '
    .. old_kind .. ' ' .. old_due)
  kept[#kept + 1] = id
  note({ id = id, kind = 'extend', ver = text[ver + 1], task = v[3], from = 'active', to = 'active',
    attempt = ARGV[at + 3], fence = fence, lease = lease_until, prev_lease = lease, worker = WORKER,
    token_h = ARGV[at + 4], priority = whole(v[4]) and v[4] })
  return { 'ok', NOW + LEASE_MS, cancel, LEASE_MS }
end

for at = 4, #ARGV, 5 do
  answers[#answers + 1] = extend(at)
end
if #kept > 0 then
  redis.pcall('SREM', STALLED, unpack(kept))
end
flush()
return answers
