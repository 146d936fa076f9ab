-- metrics_hourly: an hour of a contract, queue, task and worker: counts, rates, quantiles.
-- update: day
--
-- Each attempt and each job counts in the hour in which it ended, each submit in its own hour. Quantiles
-- are exact. Submits have no worker.
with of_attempts as (
  select *, ended_ms - ended_ms % 3600000 as hour_ms,
    -- An attempt of an SQL contract ends as `fail`; whether its job is buried is decided after it.
    case when outcome <> 'fail' then outcome when error_code = 'cancelled' then 'cancel' else 'bury' end
      as result
  from attempts where ended_ms is not null
), by_attempt as (
  select hour_ms, contract, queue, coalesce(task, '') as task, coalesce(worker_id, '') as worker_id,
    count(*) as attempts,
    count_if(result = 'complete') as completed, count_if(result = 'retry') as retried,
    count_if(result = 'bury') as buried, count_if(result = 'reap') as lost,
    count_if(result in ('release', 'snooze')) as handed_back, count_if(result = 'cancel') as cancelled,
    percentile(wait_ms, array(0.5, 0.95, 0.99)) as wait, percentile(run_ms, array(0.5, 0.95, 0.99)) as run,
    sum(run_ms) as busy_ms
  from of_attempts group by 1, 2, 3, 4, 5
), by_job as (
  select ended_ms - ended_ms % 3600000 as hour_ms, contract, queue, coalesce(task, '') as task,
    coalesce(worker_id, '') as worker_id, count(*) as jobs, count_if(last_type = 'bury') as dead,
    percentile(total_ms, array(0.5, 0.95, 0.99)) as total
  from jobs where ended_ms is not null group by 1, 2, 3, 4, 5
), by_submit as (
  select ts_ms - ts_ms % 3600000 as hour_ms, contract, queue, coalesce(task, '') as task,
    '' as worker_id, count(*) as submitted
  from events where type = 'submit' and ver > 0 group by 1, 2, 3, 4, 5
), counted as (
  select hour_ms, contract, queue, task, worker_id, coalesce(submitted, 0) as submitted,
    coalesce(attempts, 0) as attempts, coalesce(completed, 0) as completed,
    coalesce(retried, 0) as retried, coalesce(buried, 0) as buried, coalesce(lost, 0) as lost,
    coalesce(handed_back, 0) as handed_back, coalesce(cancelled, 0) as cancelled,
    coalesce(busy_ms, 0) as busy_ms, coalesce(jobs, 0) as jobs, coalesce(dead, 0) as dead,
    wait[0] as p50_wait_ms, wait[1] as p95_wait_ms, wait[2] as p99_wait_ms,
    run[0] as p50_run_ms, run[1] as p95_run_ms, run[2] as p99_run_ms,
    total[0] as p50_total_ms, total[1] as p95_total_ms, total[2] as p99_total_ms
  from by_attempt full join by_job using (hour_ms, contract, queue, task, worker_id)
  full join by_submit using (hour_ms, contract, queue, task, worker_id)
)
select *, try_divide(retried, attempts) as retry_rate, try_divide(buried, attempts) as failure_rate,
  try_divide(lost, attempts) as lost_rate, try_divide(dead, jobs) as dead_rate,
  date_format(timestamp_millis(hour_ms), 'yyyy-MM-dd') as day
from counted
