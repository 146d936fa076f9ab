-- Makes many jobs claimable: finished ones again, delayed ones early. As in BullMQ all of them enter `wait`, whatever
-- their priority, and attempts keep their count.
-- KEYS[1] wait  KEYS[2] active  KEYS[3] prioritized  KEYS[4] delayed  KEYS[5] paused  KEYS[6] meta
-- KEYS[7] events  KEYS[8] marker  KEYS[9] stalled  KEYS[10] limiter  KEYS[11] pc  KEYS[12] completed
-- KEYS[13] failed  KEYS[14] waiting-children  KEYS[15] id  KEYS[16] tenure:journal
-- ARGV[1] prefix  ARGV[2] failed, completed or delayed  ARGV[3] how many at most  ARGV[4] finished by, ms
-- Returns how many jobs were taken from their set
-- Clauses B-35 B-38
-- @include step
-- @include enqueue
-- @include job
check_types()
local STATE = ARGV[2]
local SET = STATE == 'failed' and FAILED or STATE == 'completed' and COMPLETED or DELAYED
local LAST = STATE == 'delayed' and '+inf' or ARGV[4]

local ids = call('ZRANGEBYSCORE', SET, '0', LAST, 'LIMIT', '0', ARGV[3])
if #ids > 0 then
  each_many('ZREM', SET, ids)
  local existing = {}
  for _, id in ipairs(ids) do
    local job = read_job(id)
    if job then
      existing[#existing + 1] = id
      job.state = STATE
      if STATE ~= 'delayed' then
        call('HDEL', job.key, 'finishedOn', 'processedOn', 'failedReason', 'returnvalue', 'cancel')
        rejoin_parent(job)
      end
      emit('waiting', 'jobId', id, 'prev', STATE)
      note_move(job, STATE == 'delayed' and 'promote' or 'reopen', 'waiting')
    end
  end
  each_many('LPUSH', WAIT, existing)
  wake()
end
flush()
return #ids
