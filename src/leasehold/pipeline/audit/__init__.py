"""The audit: every promise checked over the whole history.

`proof` proves most jobs sound by one aggregation without a sort. What it cannot prove goes, event
by event, through the same fold that judges the chaos tests (`explain`), which names what was broken
and shows the events. `lines` checks what concerns several jobs. `run` puts it together.
"""
