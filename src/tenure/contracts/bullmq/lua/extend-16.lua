-- Extends leases: the lock gets its whole time again. Writes nothing before a third of the lease is spent.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] worker id  ARGV[3] lease_ms
-- ARGV[4..] per lease: id, fence, token, attempt, hash of the token
-- Returns per lease { 'ok', lease_until_ms, 1 if a cancel was requested, ms left } or { 'lost', reason }
-- Clauses B-18 B-28
-- @include step
local WORKER, LEASE_S, LEASE_MS = ARGV[2], ARGV[3], tonumber(ARGV[3])
-- @include reject
local answers, extended_ids = {}, {}

local function extend(id, fence, token, attempt, token_h)
  local key = PREFIX .. id
  local lock = redis.pcall('GET', key .. ':lock')
  local v = redis.pcall('HMGET', key, 'tn', 'cancel', 'name', 'priority')
  if lock ~= token .. ':' .. fence or not v[3] then
    return reject_by_lock('extend', id, fence, token_h, lock)
  end
  local ver, _, lease, settled = read_tn(v[1])
  local state = find(v[1] or '', ' active ', 1, true) and 'active' or 'running'
  local left = tonumber(lease) - NOW
  local cancel = v[2] == '1' and 1 or 0
  if left > LEASE_MS * 2 / 3 and left <= LEASE_MS then
    return { 'ok', tonumber(lease), cancel, left }
  end
  local lease_until = text[NOW + LEASE_MS]
  call('SET', key .. ':lock', lock, 'PX', LEASE_S)
  call('HSET', key, 'tn', text[ver + 1] .. ' ' .. state .. ' ' .. lease_until .. ' ' .. settled)
  extended_ids[#extended_ids + 1] = id
  note({ id = id, kind = 'extend', ver = text[ver + 1], task = v[3], from = 'active', to = 'active',
    attempt = attempt, fence = fence, lease = lease_until, prev_lease = lease, worker = WORKER,
    token_h = token_h, priority = whole(v[4]) and v[4] })
  return { 'ok', NOW + LEASE_MS, cancel, LEASE_MS }
end

for at = 4, #ARGV, 5 do
  answers[#answers + 1] = extend(unpack(ARGV, at, at + 4))
end
if #extended_ids > 0 then
  redis.pcall('SREM', STALLED, unpack(extended_ids))
end
flush()
return answers
