-- Extends leases: each ends at the job's timeout from now, or at its old end if that is later. With ARGV[3] it writes
-- nothing while most of the lease is left.
-- KEYS[1] meta: the key {queue}:meta, which is never written; all other keys are made from its prefix
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] worker id  ARGV[3] 1 to write only if needed
-- ARGV[4..] per lease: id, token, fence ('' for any)
-- Returns per lease { lock_until_ms, 1 if its cancellation was requested, timeout_ms } or { 'lost', OmniQ's reason }
-- Clauses O-14 O-18 O-32 O-41
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
local answers = {}
for at = 4, #ARGV, 3 do
  local lock, why, job, lease_ms = extend(ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[2], ARGV[3] == '1')
  answers[#answers + 1] = why and { 'lost', why } or { lock, job.cancel and 1 or 0, lease_ms }
end
flush()
return answers
