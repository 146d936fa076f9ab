"""From a queue URL to its journal: the name under which it is known, and the reel that reads it."""

from __future__ import annotations

import hashlib
from urllib.parse import urlsplit, urlunsplit

from tenure.core.journal import SqlFormat, StreamFormat
from tenure.core.registry import journal_format, parse_url
from tenure.pipeline.source.reel import Reel
from tenure.pipeline.source.seam_reel import SeamReel
from tenure.pipeline.source.sql_reel import SqlReel
from tenure.pipeline.source.stream_reel import StreamReel


def journal_name(url: str) -> str:
    """The name of the journal behind a URL: the contract, its queue, and a mark of the store.

    Credentials and tuning options do not matter: the same history has the same name.
    """
    parsed = parse_url(url)
    tape = journal_format(url)
    parts = urlsplit(tape.store if tape else parsed.text)
    where = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    what = (tape.key if isinstance(tape, StreamFormat) else tape.table + tape.where) if tape else ""
    mark = hashlib.sha256(f"{where} {what}".encode()).hexdigest()[:8]
    queue = tape.queue if tape else parsed.options.get("queue", "")
    words = "".join(c if c.isalnum() else "-" for c in queue).strip("-")
    return f"{parsed.contract}-{words}-{mark}" if words else f"{parsed.contract}-{mark}"


def open_reel(url: str, name: str = "") -> Reel:
    """The journal behind a URL, by what its contract declares of it; rows carry its `name`."""
    tape = journal_format(url)
    name = name or journal_name(url)
    match tape:
        case StreamFormat():
            return StreamReel(tape, name)
        case SqlFormat():
            return SqlReel(tape, name)
        case None:
            return SeamReel(url, name)
