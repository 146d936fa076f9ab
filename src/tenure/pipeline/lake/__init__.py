"""The lake: events in Parquet files, with the progress of capture, known gaps, and tables.

    lake.json                                   what this is, and its schema's version
    events/day=2026-11-16/<journal>~<after>~<upto>.parquet      one range of one journal and day
    gaps/<journal>~<after>.json                 a part of a journal that was removed unread
    tables/<name>/day=.../*.parquet             made from the events by `tables`
    _capture/                                   how far capture has come

A file's name says which range it holds. So a batch that is written again after a crash replaces its
files, and a larger file that covers others makes them superfluous.
"""
