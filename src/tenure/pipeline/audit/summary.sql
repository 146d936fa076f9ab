-- The summary: counts of jobs, whether lines were served in order, and the jobs that need another look.
--
-- A line is the jobs of a queue with one priority. It is cut into spans of 16 s (of 16,384 positions
-- where these hold no time): the jobs of one span are sorted together, and of earlier spans only the
-- latest claim matters. Jobs that are open or in doubt stay by themselves (`job_h` is not null), all
-- others become one row a span.
with placed as (
  select *, (in_doubt or (:quiesced and n > 0 and not has_ended)) as open_question,
    flags & 6 <> 0 or in_doubt or not has_ended as kept,
    shiftright(flags, 32) as priority,
    case when not stood then -1 - pmod(job_h, 256)
      when flags & 128 <> 0 then shiftright(submit_pos, 36) else shiftright(submit_pos, 14) end as span
  from proof
), sorted as (
  select *, stood and max(claim_pos) over (
      partition by line_h, priority, span order by submit_pos
      rows between unbounded preceding and 1 preceding) > claim_pos as overtakes
  from placed
)
select line_h, if(kept, job_h, null) as job_h, priority, span,
  min(if(stood, claim_pos, null)) as earliest, max(if(stood, claim_pos, null)) as latest,
  max(overtakes) as overtakes,
  sum(n) as n, max(hi) as hi, bit_xor(x) as x, max(max_pos) as max_pos, max(last_pos) as last_pos,
  bit_or(flags) as flags, min(submit_pos) as submit_pos, min(claim_pos) as claim_pos,
  max(open_question) as open_question, max(has_ended) as has_ended,
  count_if(n > 0) as jobs, count_if(n > 0 and not has_ended) as open_jobs,
  sum(if(has_ended, 0, n)) as open_events,
  count_if(n > 0 and begins_late and flags & 16 = 0) as again,
  count_if(n > 0 and begins_late and flags & 16 <> 0) as begins_late,
  count_if(open_question) as looked_at,
  count_if(flags & 32 <> 0 and has_ended and not open_question) as strange
from sorted group by line_h, if(kept, job_h, null), priority, span
