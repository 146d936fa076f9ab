"""From a queue URL to the name of its journal and to the reader of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from urllib.parse import urlsplit, urlunsplit

from tenure.core.journal import SqlFormat, StreamFormat
from tenure.core.registry import journal_format, journal_urls, parse_url
from tenure.pipeline.source.range_reader import RangeReader
from tenure.pipeline.source.seam_reader import SeamRangeReader
from tenure.pipeline.source.sql_reader import SqlRangeReader
from tenure.pipeline.source.stream_reader import StreamRangeReader


def all_journals(urls: Iterable[str]) -> list[str]:
    """The URLs of all journals of these queues: a queue with shards has one in each."""
    return [journal for url in urls for journal in journal_urls(url)]


def journal_name(url: str) -> str:
    """The name of the journal behind a URL: the contract, the queue, and a hash of the store.

    Credentials and tuning options do not matter: the same history has the same name.
    """
    parsed = parse_url(url)
    fmt = journal_format(url)
    parts = urlsplit(fmt.store if fmt else parsed.text)
    where = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    what = (fmt.key if isinstance(fmt, StreamFormat) else fmt.table + fmt.where) if fmt else ""
    mark = hashlib.sha256(f"{where} {what}".encode()).hexdigest()[:8]
    queue = fmt.queue if fmt else parsed.options.get("queue", "")
    words = "".join(c if c.isalnum() else "-" for c in queue).strip("-")
    return f"{parsed.contract}-{words}-{mark}" if words else f"{parsed.contract}-{mark}"


def open_reader(url: str, name: str = "") -> RangeReader:
    """The reader of the journal behind a URL, by its declared format; rows carry `name`."""
    fmt = journal_format(url)
    name = name or journal_name(url)
    match fmt:
        case StreamFormat():
            return StreamRangeReader(fmt, name)
        case SqlFormat():
            return SqlRangeReader(fmt, name)
        case None:
            return SeamRangeReader(url, name)
