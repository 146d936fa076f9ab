"""Events that another program wrote into a journal stop neither capture nor tables nor audit."""

from __future__ import annotations

from pathlib import Path

from pyspark.sql import SparkSession

from tenure.core.journal import StreamFormat
from tenure.core.registry import journal_format
from tenure.pipeline.audit.lakes import audit_lake
from tenure.pipeline.capture import capture
from tenure.pipeline.lake import Lake
from tenure.pipeline.report.figures import figures_of
from tenure.pipeline.report.page import page
from tenure.pipeline.tables.update import update_tables
from tenure.store.redis import BulkRedis
from tests.spark.working import work

MARKUP = "<script>alert(1)</script>"
QUOTED = "x') or 1=1; drop table jobs; --\\\"`"
NUMBERS = ["9" * 18, str(2**63 - 1), str(2**31), "-1", "253402300799999"]


def hostile_lines() -> list[str]:
    """Lines of every kind of event, with each number in every place, and texts that quote."""
    kinds = ["submit", "claim", "complete", "retry", "pause", "remove", "offset", "gap", MARKUP]
    states = {"submit": ("", "queued"), "claim": ("queued", "running")}
    lines = []
    for number in NUMBERS:
        for kind in kinds:
            before, after = states.get(kind, ("running", "done"))
            head = [f"{kind}-{number}", kind, number, number, QUOTED, before, after]
            lines.append("\t".join([*head, *[number] * 5, MARKUP, number, *[number] * 12]))
    data = '{"after":0,"upto":1000000000000000000,"units":1}'
    lines += [f"spoof\toffset\t1\t5{chr(9) * n}{data}" for n in range(1, 25)]
    lines += ["\t\t\t", "a\tb\t\t", "\x00\t\x00\t1\t1", "long\tsubmit\t1\t1\t" + "y" * 100_000]
    return lines


async def test_garbled_events_stop_neither_capture_nor_tables_nor_audit(
    spark: SparkSession, lake: str, streams_url: str, bullmq_url: str
) -> None:
    urls = [streams_url, bullmq_url]
    await work(streams_url, 20)
    for url in urls:
        fmt = journal_format(url)
        assert isinstance(fmt, StreamFormat)
        with BulkRedis(fmt.store) as redis:
            for line in hostile_lines():
                redis.call("XADD", fmt.key, "*", "e", line)
            redis.call("XADD", fmt.key, "*", "s", "\tsubmit\t1\t1", "ids", b"\xff\xfe\t\xff")
            redis.call("XADD", fmt.key, "*", "other", "program")
    await work(bullmq_url, 20)
    capture(spark, lake, urls, once=True)
    update_tables(spark, lake)
    await work(streams_url, 20, prefix="later")
    capture(spark, lake, urls, once=True)
    update_tables(spark, lake)  # goes on with the open rows of the first
    audited = audit_lake(spark, lake)
    done = Lake(lake).read(spark, "jobs").where("state in ('done', 'completed')")
    good = done.where("task like 'task%'").count()
    assert good == 20 + 20 + 20, "the events before and after them are all there"
    assert audited.violations > 0
    text = page(figures_of(spark, lake))
    assert MARKUP not in text
    assert not list(Path(lake).parent.glob("**/*alert*"))
