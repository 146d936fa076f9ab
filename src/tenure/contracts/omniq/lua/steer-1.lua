-- Cancels, retries or removes jobs for a user. One call searches a long list from end to end at most once; jobs for
-- which it would have to do so again answer 'AGAIN'.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] cancel | retry | remove
-- ARGV[3] for remove: the lane it must be in (wait, gwait, delayed, failed, completed; '' for any)
-- ARGV[4] failed jobs to keep  ARGV[5..] job ids
-- Returns per id 'OK', 'REQUESTED' (its worker will stop it), 'AGAIN', or why not: NO_JOB, NOT_FAILED, ACTIVE,
--   LANE_MISMATCH, NOT_IN_LANE, FINISHED
-- Clauses O-25 O-26 O-34 O-36
local GIVEN_NOW = ARGV[1]
-- @include steer
KEEP_FAILED = tonumber(ARGV[4])
local answers = {}
for at = 5, #ARGV do
  answers[#answers + 1] = steer(ARGV[2], ARGV[at], ARGV[3])
end
flush_steering()
return answers
