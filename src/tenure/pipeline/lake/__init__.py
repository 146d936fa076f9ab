"""The lake: events kept as Parquet files, with what was captured, what is missing, and tables.

    lake.json                                   what this is, and its schema's version
    events/day=2026-11-16/<journal>~<after>~<upto>.parquet      one range of one journal and day
    gaps/<journal>~<after>.json                 a part of a journal that was gone before it was read
    tables/<name>/day=.../*.parquet             made from the events by `tables`
    _capture/                                   how far capture has come

A file's name says which range it holds. So a batch that is written again after a crash replaces
itself, a larger file that covers others makes them superfluous, and any reader that takes all the
files of `events/` sees true events, each once.
"""
