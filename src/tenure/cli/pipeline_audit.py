"""What `tenure pipeline audit` audits: the lake, live journals, or history files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tenure.pipeline.audit.run import Audited

# From here on Java's second compiler is worth its start: a few million events.
LARGE_BYTES = 32 << 20

Found = tuple["Audited", list[dict[str, Any]]]


def is_large(history: Sequence[str], lake: str, *, full: bool) -> bool:
    """Whether the audit will run long, as far as sizes of local files tell."""
    if history:
        paths = [Path(each) for each in history if "://" not in each]
        each_file = (file for path in paths for file in (path, *path.rglob("*.parquet")))
        return sum(file.stat().st_size for file in each_file if file.is_file()) > LARGE_BYTES
    from tenure.pipeline.audit.lakes import bytes_to_read

    size = bytes_to_read(lake, full=full)
    return size is None or size > LARGE_BYTES


def audit_anything(
    spark: SparkSession,
    history: Sequence[str],
    lake: str,
    *,
    full: bool,
    quiesced: bool,
    partial: bool,
    show: int,
) -> Found:
    """The summary, and some of what was found."""
    urls = [each for each in history if "+" in each.partition("://")[0]]
    files = [each for each in history if each not in urls]
    if urls and files:
        raise UsageError("audit either live queues or files, not both at once")
    if history:
        return _of_events(spark, urls, files, quiesced=quiesced, partial=partial, show=show)
    from tenure.pipeline.audit.lakes import audit_lake, violations
    from tenure.pipeline.lake.files import LakeFiles

    audited = audit_lake(spark, lake, full=full, quiesced=quiesced)
    return audited, _shown(violations(spark, LakeFiles(lake)), show)


def _of_events(
    spark: SparkSession,
    urls: Sequence[str],
    files: Sequence[str],
    *,
    quiesced: bool,
    partial: bool,
    show: int,
) -> Found:
    from tenure.pipeline.audit.deliveries import outbox_events
    from tenure.pipeline.audit.run import Audit, History, completed
    from tenure.pipeline.events import file_events, journal_events
    from tenure.pipeline.source.opening import journal_name, open_reel

    unseen: frozenset[str] = frozenset()
    cut: list[str] = []
    if urls:
        events = journal_events(spark, urls)
        for url in urls:
            reel = open_reel(url)
            # A journal that the store has begun to trim has no beginning any more.
            if reel.gone(reel.head()) != 0:
                cut.append(journal_name(url))
            reel.close()
    else:
        events = file_events(spark, files[0])
        for path in files[1:]:
            events = events.unionByName(file_events(spark, path))
        events, unseen = completed(events)
        cut = (
            [row.journal for row in events.select("journal").distinct().collect()]
            if partial
            else []
        )
    history = History(
        new=events,
        all=lambda: events,
        cut=cut,
        unseen=unseen,
        quiesced=quiesced,
        outbox=outbox_events(events),
    )
    audit = Audit(spark, history)
    try:
        return audit.result(), _shown(audit.violations, show)
    finally:
        audit.close()


def _shown(found: DataFrame | None, show: int) -> list[dict[str, Any]]:
    if found is None:
        return []
    rows = found.where("invariant <> 'unobserved'").orderBy("invariant", "job_id").limit(show)
    return [row.asDict() for row in rows.collect()]
