-- Pauses or resumes the queue. Jobs stay in `wait` either way, so that neither a 5.x nor a 6.x client can lose one by
-- resuming.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] pause or resume
-- Returns 1 if something changed
-- Clauses B-16 B-34
-- @include step
if ARGV[2] == 'pause' then
  call('HSET', META, 'paused', '1')
  merge_paused()
  call('DEL', MARKER)
  emit('paused')
else
  call('HDEL', META, 'paused')
  merge_paused()
  if call('LLEN', WAIT) > 0 or call('ZCARD', PRIORITIZED) > 0 then
    IS_PAUSED = false
    wake()
  end
  must_mark_due = true
  emit('resumed')
end
local changed = (ARGV[2] == 'pause') ~= (settings[1] and true or false)
if changed then
  note({ kind = ARGV[2] })
end
flush()
return changed and 1 or 0
