-- What users do to jobs from outside: cancel, retry, remove. One call never searches a long list
-- from end to end more than once; jobs left over answer 'again'.
-- KEYS[1] meta, with the queue before it: the anchor, after which every other key is named
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] cancel | retry | remove
-- ARGV[3] for remove: the lane it must be in (wait, gwait, delayed, failed, completed; '' for any)
-- ARGV[4] failed jobs to keep  ARGV[5..] job ids
-- Returns per id 'OK', 'REQUESTED' (its worker is told), 'AGAIN', or why not: NO_JOB, NOT_FAILED, ACTIVE,
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
