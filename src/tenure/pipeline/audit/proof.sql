-- The proof: which jobs of a history are sound, by one aggregation.
--
-- Every event records the state of its job before it and after it. XOR the hashes of the states after
-- with those of the states before. If the chain of events is unbroken, only the hash of the last state
-- remains: every other state is there twice, and the first event has none before it. So a chain is
-- proven without sorting, with an error probability of 2^-38. Rules for a single event are conditions
-- (`bad`). A row of an event is the proof of a history of one event; rows of a job merge by sum, max,
-- min, and, or: so `carried` rows of an earlier audit go on with new events.
--
-- Numbers of the last event are packed behind its number: one maximum finds both. Jobs go by hashes of
-- their names; two jobs with the same hash are not proven, and then looked at event by event.
--
-- `steps` has the allowed steps (`steps.py`): `bits` of their states and types, what they left (`kind`),
-- numbers of the two states, and the `marks` of their contract. A step that it does not have is wrong.
with known as (
  select /*+ broadcast(steps) */ events.*, bits, kind, was, becomes,
    coalesce(steps.marks, contract_marks) as marks,
    coalesce(bits & 1 <> 0, false) as from_running, coalesce(bits & 2 <> 0, false) as to_running,
    coalesce(bits & 16 <> 0, false) as submits, coalesce(bits & 32 <> 0, false) as claims,
    coalesce(bits & 64 <> 0, false) as returns, xxhash64(worker_id, token_h) as who
  from (select *, xxhash64(contract, type, from_state, to_state) as step_h from new_events) as events
  left join steps using (step_h)
), hashed as (
  select *,
    xxhash64(bigint(ver), becomes, fence, lease_until_ms,
      if(bits & 8 <> 0, -1L, bigint(attempt)), if(to_running, who, 0L)) as after_h,
    if(ver = 1, 0L, xxhash64(bigint(ver - 1), was, prev_fence, prev_lease_until_ms,
      if(bits & 4 <> 0, -1L, bigint(attempt - int(claims) + int(returns))),
      if(from_running, who, 0L))) as before_h,
    -- What is wrong with the numbers of a step, or with the step itself.
    ver > 0 and (bits is null
      or ((lease_until_ms > 0) <> to_running and bits & 256 = 0)           -- but for a removal
      or fence <> prev_fence + int(claims)
      or (claims and lease_until_ms > 0 and lease_until_ms <= ts_ms)       -- over when it was taken
      or (bits & 128 <> 0 and ts_ms < prev_lease_until_ms)                 -- reaped too early
      or (bits & 1024 <> 0 and lease_until_ms < prev_lease_until_ms)       -- extended to earlier
      or (max_attempts > 0 and attempt > max_attempts)
      or (bits & 528 <> 0 and attempt <> 0)                                -- submitted or reopened
      or (submits and (fence <> 0 or ver <> 1))
      or (ver = 1 and not submits and not claims)
      or ver >= 4194304) as bad
  from known
), rows as (
  select xxhash64(journal, contract, queue) as line_h, xxhash64(job_id) as job_h,
    bigint(ver > 0) as n,
    shiftleft(bigint(ver), 40) | shiftleft(bigint(coalesce(kind, 0)), 38)
      | (coalesce(after_h, 0L) & 274877906943) as hi,
    if(ver > 0, coalesce(after_h, 0L) ^ coalesce(before_h, 0L), 0L) as x,
    if(ver > 0, pos, 0L) as max_pos,
    shiftleft(bigint(ver), 40) | (pos & 1099511627775) as last_pos,
    -- Bits: 0 wrong, 1 its clock is late, 2 a pause, 3 expired, 4 its journal is cut, 5 begun by
    -- others, 6 in line, 7 timed, 8 and more its contract (these are `marks`), 32 and more priority.
    bigint(bad)
      | bigint(marks & 128 <> 0 and type <> 'submit' and shiftright(pos, 22) - ts_ms > 1000) << 1
      | if(ver = 0, bigint(type = 'pause') << 2 | bigint(type = 'expire') << 3, 0L)
      | bigint(cut) << 4 | bigint(ver = 1 and claims) << 5 | marks
      | if(submits, shiftleft(bigint(priority), 32), 0L) as flags,
    if(submits and due_ms = 0, pos, 9223372036854775807) as submit_pos,
    if(claims, pos, 9223372036854775807) as claim_pos
  from hashed
  union all
  select * from carried
), jobs as (
  select line_h, job_h, sum(n) as n, max(hi) as hi, bit_xor(x) as x, max(max_pos) as max_pos,
    max(last_pos) as last_pos, bit_or(flags) as flags, min(submit_pos) as submit_pos,
    min(claim_pos) as claim_pos
  from rows group by line_h, job_h
)
select *, n <> shiftright(hi, 40) as begins_late,
  shiftright(hi, 38) & 3 >= 2 or flags & 8 <> 0 as has_ended,
  n <> 0 and (n <> shiftright(hi, 40) or (hi ^ x) & 274877906943 <> 0
    or (last_pos ^ max_pos) & 1099511627775 <> 0) or flags & 1 <> 0 as in_doubt,
  -- Whether it stood in a line that promises first in, first out.
  flags & 64 <> 0 and submit_pos < 9223372036854775807 and claim_pos < 9223372036854775807 as stood
from jobs
