-- jobs: one row per job: its state, how often it started, how long it took.
-- update: merge journal, contract, queue, job_id
--
-- Each event is the row of a job with one event, and rows of one job merge by min, max and sum. `last`
-- begins with the number of the event: its maximum is the latest one. An ended job that goes on (it was
-- sent back, or removed) is among `carried` too.
with parts as (
  select journal, contract, queue, job_id, ver as first_ver,
    if(type = 'submit', ts_ms, null) as submitted_ms,
    if(type = 'claim', ts_ms, null) as first_claimed_ms,
    task, if(type = 'submit', due_ms, null) as due_ms, priority, gid, max_attempts,
    struct(ver, to_state as state, to_kind as kind, ts_ms, type, error_code, worker_id, attempt, fence)
      as last,
    bigint(type = 'claim') as starts, bigint(type = 'complete') as completions,
    bigint(type = 'retry') as retries, bigint(type = 'reap') as lost,
    bigint(type in ('release', 'snooze')) as releases,
    bigint(type in ('submit', 'reopen')) as epochs
  from new_events where ver > 0
  union all
  select journal, contract, queue, job_id, first_ver, submitted_ms, first_claimed_ms, task, due_ms,
    priority, gid, max_attempts,
    struct(last_ver as ver, state, kind, last_ms as ts_ms, last_type as type, error_code, worker_id,
      attempt, fence),
    starts, completions, retries, lost, releases, epochs
  from carried
), merged as (
  select journal, contract, queue, job_id, min(first_ver) as first_ver,
    min(submitted_ms) as submitted_ms, min(first_claimed_ms) as first_claimed_ms,
    max(task) as task, max(due_ms) as due_ms, max(priority) as priority, max(gid) as gid,
    max(max_attempts) as max_attempts, max(last) as last, sum(starts) as starts,
    sum(completions) as completions, sum(retries) as retries, sum(lost) as lost,
    sum(releases) as releases, sum(epochs) as epochs
  from parts group by journal, contract, queue, job_id
), ended as (
  select *, last.kind = 'final' or last.type = 'remove' as is_final,
    if(last.kind = 'final' or last.type = 'remove', last.ts_ms, null) as ended_ms
  from merged
)
select journal, contract, queue, job_id, task, gid, priority, max_attempts,
  if(last.type = 'remove', 'removed', last.state) as state, is_final, last.kind as kind,
  last.type as last_type, last.ver as last_ver, last.ts_ms as last_ms, last.error_code as error_code,
  last.worker_id as worker_id, last.attempt as attempt, last.fence as fence,
  first_ver, submitted_ms, due_ms, first_claimed_ms, ended_ms,
  first_claimed_ms - greatest(submitted_ms, due_ms) as wait_ms,
  ended_ms - submitted_ms as total_ms,
  starts, completions, retries, lost, releases, epochs,
  coalesce(date_format(timestamp_millis(ended_ms), 'yyyy-MM-dd'), 'open') as day
from ended
