-- audit_verdicts: what the audits so far say of each promise that a journal can show.
-- update: view of audit_runs
--
-- The last run has the sums. `unobserved` jobs could not be judged.
with last as (
  select max_by(from_json(state, 'total struct<verdicts: array<struct<invariant: string, text: string,
    contracts: string, jobs: bigint, violations: bigint, unobserved: bigint>>>'), bigint(run)) as state
  from tenure.audit_runs
)
select each.*, case when each.violations > 0 then 'broken' when each.jobs > each.unobserved then 'sound'
    else 'not judged' end as verdict
from last lateral view explode(state.total.verdicts) as each
