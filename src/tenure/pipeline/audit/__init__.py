"""The audit: checks every invariant that a journal can show over the whole history.

`proof.sql` proves most jobs correct by one aggregation, without a sort; `summary.sql` counts them,
checks the order of claims, and keeps the jobs that are open or in doubt. Jobs in doubt are checked
event by event (`explain`) with the checker of the chaos tests, which names the broken invariant and
shows the events. `run` combines these steps; `lakes` continues after the last audit.
"""
