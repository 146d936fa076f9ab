"""The lake: a folder or bucket of Delta tables.

    events              every event, by journal; rows of type `gap` under the journal `gaps`
    attempts, jobs ...  made from the events by the files of `tables`
    violations, audit_runs, audit_open      what audits found, their summaries, and what they carry

`place` knows where a lake is, `table` what can be done with a table, `delta_rs` how Spark reads and
writes one without a jar. Every table knows up to which position of each journal its rows go.
"""
