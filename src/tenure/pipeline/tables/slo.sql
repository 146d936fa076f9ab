-- slo: a day of a queue: how many jobs finished, and how many succeeded within the target.
-- update: day
--
-- `targets` has the milliseconds from submit to end by queue; the queue '' stands for all others.
with aimed as (
  select j.*, coalesce(t.target_ms, (select max(target_ms) from targets where queue = '')) as target_ms
  from jobs j left join targets t on t.queue = j.queue and t.queue <> ''
  where total_ms is not null and last_type <> 'remove'
)
select contract, queue, target_ms, count(*) as finished,
  count_if(total_ms <= target_ms and last_type = 'complete') as within,
  count_if(total_ms <= target_ms and last_type = 'complete') / count(*) as share, day
from aimed group by contract, queue, target_ms, day
