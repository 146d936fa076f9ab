"""The audit: checks every invariant over the whole history.

`proof` proves most jobs correct by sums over columns, without a sort; `parts` distributes this over
Spark tasks. Jobs that it cannot prove are checked event by event (`explain`) with the checker of
the chaos tests, which names the broken invariant and shows the events. `order` and `lines` check
invariants over several jobs. `run` combines these steps; `lakes` continues after the last audit.
"""
