-- attempts: one row per attempt: when it could start, when it did, and how it ended.
-- update: merge journal, contract, queue, job_id, fence
--
-- An attempt is a job and a fence. An event that returns a job to waiting ends one attempt and begins
-- the wait of the next: it is part of two rows. Rows of one attempt merge by max and sum, so those of
-- open attempts (`carried`) go on with new events.
with events as (
  select *, from_kind = 'running' and to_kind <> 'running' as ends,
    to_kind = 'waiting' and type <> 'remove' as waits, greatest(ts_ms, due_ms) as ready
  from new_events where ver > 0
), parts as (
  select journal, contract, queue, job_id, fence, task,
    if(type = 'claim', worker_id, null) as worker_id,
    if(type = 'claim', attempt, null) as attempt,
    cast(null as bigint) as ready_ms,
    if(type = 'claim', ts_ms, null) as claimed_ms,
    if(ends, ts_ms, null) as ended_ms,
    if(ends, type, null) as outcome,
    if(ends, error_code, null) as error_code,
    if(ends and waits, ready, null) as next_due_ms,
    bigint(type = 'extend') as extends, bigint(type = 'report') as reports
  from events where fence > 0
  union all
  select journal, contract, queue, job_id, fence + 1, task,
    null, null, ready, null, null, null, null, null, 0, 0
  from events where waits
  union all
  select journal, contract, queue, job_id, fence, task, worker_id, attempt, ready_ms, claimed_ms,
    ended_ms, outcome, error_code, next_due_ms, extends, reports
  from carried
), merged as (
  select journal, contract, queue, job_id, fence,
    max(task) as task, max(worker_id) as worker_id, max(attempt) as attempt,
    max(ready_ms) as ready_ms, max(claimed_ms) as claimed_ms, max(ended_ms) as ended_ms,
    max(outcome) as outcome, max(error_code) as error_code, max(next_due_ms) as next_due_ms,
    sum(extends) as extends, sum(reports) as reports
  from parts group by journal, contract, queue, job_id, fence
)
select *, claimed_ms - ready_ms as wait_ms, ended_ms - claimed_ms as run_ms,
  next_due_ms - ended_ms as backoff_ms,
  coalesce(date_format(timestamp_millis(ended_ms), 'yyyy-MM-dd'), 'open') as day
from merged
-- Events after the end of an attempt (its job is sent back, or removed) make no row.
where ready_ms is not null or claimed_ms is not null
