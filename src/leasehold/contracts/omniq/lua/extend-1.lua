-- Keeps leases: each lasts the job's whole timeout from now, never shorter than it was. A call that comes
-- while most of the lease is left may ask for nothing to be written.
-- KEYS[1] {queue}:meta, the anchor: every other key is named after it and shares its slot
-- ARGV[1] now_ms ('0': the server's clock)  ARGV[2] worker id  ARGV[3] 1 to write only when it is time
-- ARGV[4..] per lease: id, token, fence ('' for any)
-- Returns per lease { lock_until_ms, 1 if somebody asked to cancel it, timeout_ms } or { 'lost', OmniQ's word }
-- Clauses O-14 O-18 O-32 O-41
local GIVEN_NOW = ARGV[1]
-- @include head
-- @include job
-- @include guard
local LAZY = ARGV[3] == '1'
local answers = {}
for at = 4, #ARGV, 3 do
  local id, token, fence = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local job = read_job(id)
  local lock = call('ZSCORE', ACTIVE, id)
  local why = refusal(job, token, fence, lock)
  if why then
    reject(id, job, fence, ARGV[2], 'extend')
    answers[#answers + 1] = { 'lost', why }
  else
    local lease_ms = job.timeout_ms > 0 and job.timeout_ms or 60000
    local held = tonumber(lock)
    local new = math.max(held, NOW + lease_ms)
    if new > held and not (LAZY and held - NOW > lease_ms * 0.6) then
      first_sight(job)
      record(job, 'extend', 'active', job.attempt, text[new], job.worker)
      call('HSET', job.key, 'lock_until_ms', text[new], 'updated_ms', NOW_S, 'lh',
        words(job, 'active', text[new], job.worker))
      active_on[#active_on + 1], active_on[#active_on + 2] = text[new], id
    else
      new = held
    end
    answers[#answers + 1] = { new, job.cancel and 1 or 0, lease_ms }
  end
end
flush()
return answers
