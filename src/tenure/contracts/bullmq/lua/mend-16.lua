-- Repairs keys of the queue that other programs have overwritten: a key of another type is renamed, a counter that is
-- not a whole number starts anew. The caller runs this after a script has raised on such a key, which scripts do before
-- they write anything.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix
-- Returns { name, reason } of each key that was repaired
-- Clauses B-55
-- @include head
local KEPT_MS = '604800000' -- a week
local NAMES = { list = { WAIT, ACTIVE, PAUSED }, hash = { META, PREFIX .. 'tenure:workers',
  PREFIX .. 'metrics:completed', PREFIX .. 'metrics:failed' },
  zset = { PRIORITIZED, DELAYED, MARKER, COMPLETED, FAILED, CHILDREN, PREFIX .. 'repeat', PREFIX .. 'tenure:ended' },
  set = { STALLED }, stream = { EVENTS, JOURNAL, PREFIX .. 'tenure:quarantine' },
  string = { LIMITER, PC, ID, PREFIX .. 'stalled-check' } }

local HOLDS_JOBS = { [WAIT] = true, [ACTIVE] = true, [PAUSED] = true, [PRIORITIZED] = true, [DELAYED] = true,
  [CHILDREN] = true }

local id_lost = false
for expected, keys in pairs(NAMES) do
  for _, key in ipairs(keys) do
    local kind = call('TYPE', key).ok
    if kind ~= expected and kind ~= 'none' then
      local name = key:sub(#PREFIX + 1)
      local renamed = PREFIX .. 'tenure:quarantine:' .. name
      quarantine(name, 'the key is a ' .. kind .. ', not a ' .. expected)
      call('RENAME', key, renamed)
      id_lost = id_lost or key == ID
      call('PEXPIRE', renamed, KEPT_MS)
      if HOLDS_JOBS[key] then
        call('SET', PREFIX .. 'tenure:restore', '') -- upkeep searches for the jobs that were in the key
      end
    end
  end
end
-- New ids continue from the clock, which is greater than every id that was counted.
if id_lost then
  call('SET', ID, NOW_S)
elseif call('EXISTS', ID) == 1 and not whole(call('GET', ID)) then
  quarantine('id', 'the counter is not a whole number')
  call('SET', ID, NOW_S)
end
for _, counter in ipairs({ PC, LIMITER }) do
  if call('EXISTS', counter) == 1 and not whole(call('GET', counter)) then
    quarantine(counter:sub(#PREFIX + 1), 'the counter is not a whole number')
    call('DEL', counter)
  end
end
return quarantined
