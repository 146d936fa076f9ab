-- latency_hourly: how many waits, runs and totals of an hour lay in which power of two milliseconds.
-- update: day
--
-- Buckets add up over any time; quantiles do not.
with times as (
  select ended_ms, contract, queue, 'wait' as kind, wait_ms as ms from attempts
  union all
  select ended_ms, contract, queue, 'run', run_ms from attempts
  union all
  select ended_ms, contract, queue, 'total', total_ms from jobs
)
select ended_ms - ended_ms % 3600000 as hour_ms, contract, queue, kind,
  int(floor(log2(greatest(ms, 0) + 1))) as bucket, count(*) as count,
  date_format(timestamp_millis(ended_ms - ended_ms % 3600000), 'yyyy-MM-dd') as day
from times where ended_ms is not null and ms is not null
group by 1, 2, 3, 4, 5
