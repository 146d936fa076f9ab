"""Capture: one streaming query that follows journals into the table of events, exactly once.

    readStream.format("tenure") -> foreachBatch -> events.append_events (-> keep_payloads)

The table itself says how far it goes (`lake.table`): the query begins there, and a batch is
committed only if it begins where the table ends. So a crash at any moment, a repeated batch, and
a second capture of the same journals are harmless, and the checkpoint of Spark can be temporary.
What was trimmed before it could be read is a row of type `gap` among the events.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec
from py4j.protocol import Py4JError

from tenure.core.errors import Conflict, UsageError
from tenure.core.journal import StreamFormat
from tenure.core.registry import journal_format, parse_url
from tenure.pipeline.delta_rs import MOVED
from tenure.pipeline.lake import Lake, url_property
from tenure.pipeline.personal import keep_payloads
from tenure.pipeline.schema import position_text
from tenure.pipeline.session import one_line
from tenure.pipeline.source.offsets import (
    Gap,
    Mark,
    all_journals,
    epoch_name,
    journal_name,
    open_reader,
    write_offset,
)
from tenure.pipeline.source.ranges import BEGINNING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

MAX_ROWS = 1_000_000
EVERY_S = 5.0
_LOOK_S = 0.5
_WAIT_S = 5.0
_TIDY_EVERY = 16


class Captured(msgspec.Struct, frozen=True, kw_only=True):
    """What a capture did: events new in the lake, how many it holds, and new gaps."""

    events: int
    total: int
    gaps: list[Gap]


def capture(
    spark: SparkSession,
    address: str,
    urls: Sequence[str],
    *,
    once: bool = False,
    every_s: float = EVERY_S,
    max_rows: int = MAX_ROWS,
    parts: int = 0,
    secrets: Sequence[str] | None = None,
    tell: Callable[[str], None] = lambda _text: None,
    until: Callable[[], bool] = lambda: False,
) -> Captured:
    """Follow journals; with `once` up to what exists now, else until `until` returns True.

    With `secrets` payloads and results of ended jobs are kept too, without the usual secrets and
    those of these names. `tell` is called with every gap, and when another capture of the same
    journals is waited for.
    """
    urls = all_journals(urls)
    _check(urls, address)
    lake = Lake(address)
    lake.begin()
    lake.events.set_properties(
        {url_property(journal_name(url)): parse_url(url).safe for url in urls}
    )
    before, known = sum(lake.journals().values()), {str(gap) for gap in lake.gaps()}
    options = {
        "urls": "\n".join(urls),
        "consumer": lake.consumer(),
        "max_rows": str(max_rows),
        "parts": str(parts or _cores(spark)),
        "markers": "true",
        "fail_on_loss": "false",
    }
    seen = set(known)

    def look() -> bool:
        for gap in lake.gaps():
            if str(gap) not in seen:
                seen.add(str(gap))
                tell(f"gap: {gap}")
        return until()

    # From here on the stores do not trim what this lake lacks.
    _tell_stores(lake, urls)
    while not _followed(_start(spark, lake, options, once, every_s, secrets), look):
        tell("another capture writes the same journals into this lake; this one waits")
        time.sleep(random.uniform(0, _WAIT_S))  # not a secret
    if once:  # everything that is in the table may be trimmed
        _tell_stores(lake, urls)
    new = [gap for gap in lake.gaps() if str(gap) not in known]
    total = sum(lake.journals().values())
    return Captured(events=total - before, total=total, gaps=new)


def release(urls: Sequence[str], address: str, consumer: str = "") -> None:
    """Stop capturing these queues into this lake: their stores may trim without regard to it.

    `consumer` is the name under which a store knows a lake that is gone.
    """
    name = consumer or Lake(address).consumer() or address
    for url in all_journals(urls):
        tell_store(url, "", name)


def starting_marks(lake: Lake, urls: Sequence[str]) -> dict[str, Mark]:
    """Where the table ends in these journals; none for one that it does not know."""
    found: dict[str, Mark] = {}
    for url in urls:
        journal = journal_name(url)
        epoch = lake.events.epoch(journal)
        if epoch < 0:
            continue
        name = epoch_name(journal, epoch)
        (position,) = lake.events.positions([name]).values()
        is_stream = isinstance(journal_format(url), StreamFormat)
        upto = position_text(position, is_stream=is_stream)
        found[journal] = Mark(upto=upto, added=lake.events.units(name), epoch=epoch)
    return found


def _start(
    spark: SparkSession,
    lake: Lake,
    options: Mapping[str, str],
    once: bool,
    every_s: float,
    secrets: Sequence[str] | None,
) -> StreamingQuery:
    urls = options["urls"].splitlines()
    marks = msgspec.json.encode(write_offset(starting_marks(lake, urls))).decode()
    events = lake.events

    def append(batch: DataFrame, number: int) -> None:
        events.append_events(batch)
        if secrets is not None:
            keep_payloads(batch.sparkSession, lake, urls, secrets)
        if number % _TIDY_EVERY == 0:
            events.tidy()

    if secrets is not None:  # of events that an earlier capture left without them
        with suppress(Conflict):  # another capture keeps them
            keep_payloads(spark, lake, urls, secrets)
    stream = spark.readStream.format("tenure").options(**options)
    writer = (
        stream.option("starting_offsets", marks)
        .load()
        .writeStream.foreachBatch(append)
        .queryName("tenure-capture")
    )
    if once:
        return writer.trigger(availableNow=True).start()
    return writer.trigger(processingTime=f"{every_s} seconds").start()


def _followed(query: StreamingQuery, look: Callable[[], bool]) -> bool:
    """Wait until the query ends, or `look` wants it to; False if another capture overtook it."""
    try:
        with one_line():
            while not query.awaitTermination(_LOOK_S):  # type: ignore[arg-type]
                if look():
                    break
            look()
    except Exception as error:
        if MOVED in str(error):
            return False
        raise
    finally:
        with suppress(OSError, EOFError, Py4JError):  # if Java has ended, so has the query
            if query.isActive:
                query.stop()
    return True


def tell_store(url: str, upto: str, consumer: str) -> None:
    """Tell a store that it may trim up to here; "" ends its waiting for the consumer."""
    reader = open_reader(url)
    try:
        reader.captured(upto, consumer)
    finally:
        reader.close()


def _tell_stores(lake: Lake, urls: Sequence[str]) -> None:
    marks = starting_marks(lake, urls)
    for url in urls:
        mark = marks.get(journal_name(url))
        tell_store(url, (mark and mark.upto) or BEGINNING, lake.consumer())


def _check(urls: Sequence[str], address: str) -> None:
    if not urls:
        raise UsageError("capture needs at least one queue URL")
    names = [journal_name(url) for url in urls]
    if len(set(names)) < len(names):
        raise UsageError("two of these URLs name the same journal; name each once")
    if not address:
        raise UsageError("capture needs a lake: --lake PATH")


def _cores(spark: SparkSession) -> int:
    """How many tasks may run in parallel; works with Spark Connect too."""
    master = spark.conf.get("spark.master", "") or ""
    inside = master.partition("[")[2].rstrip("]").partition(",")[0]
    if inside.isdecimal():
        return int(inside)
    import os

    return os.cpu_count() or 2
