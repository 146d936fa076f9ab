"""The audit: every promise checked over the whole history.

`proof` proves most jobs sound by sums over columns, without a sort; `parts` moves them through
Spark. What they cannot prove goes, event by event, through the same fold that judges the chaos
tests (`explain`), which names what was broken and shows the events. `order` and `lines` check what
concerns several jobs. `run` puts it together, `lakes` goes on where the last audit ended.
"""
