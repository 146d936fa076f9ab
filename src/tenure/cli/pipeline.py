"""`tenure pipeline`: capture, count and audit the history of queues; enqueue and replay jobs."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from tenure.cli.config import load_config
from tenure.cli.console import (
    Exit,
    answer,
    emit,
    emit_text,
    json_option,
    note,
    paint,
    queue_option,
    queues_option,
    table,
)
from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from tenure.pipeline.audit.run import Audited

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _spark_options(function: _Function) -> _Function:
    """The options of every command: where and how Spark runs."""
    for option in (
        click.option("--master", default="local[*]", show_default=True, help="Spark's master."),
        click.option("--remote", default="", metavar="sc://HOST", help="A Spark Connect server."),
        click.option("--driver-memory", default="2g", show_default=True),
        click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark."),
        click.option("--ship", is_flag=True, help="Send this package to the executors."),
    ):
        function = option(function)
    return function


@contextmanager
def _session(spark: dict[str, Any], *, quick: bool = True) -> Iterator[SparkSession]:
    """Open a Spark session for one command; `quick` is for commands that take seconds."""
    from tenure.pipeline.session import (
        SparkSettings,
        one_line,
        open_session,
        quiet_endings,
        stop_quietly,
    )

    note("starting Spark")
    quiet_endings()
    opened = open_session(
        SparkSettings(
            master=spark["master"],
            remote=spark["remote"],
            driver_memory=spark["driver_memory"],
            conf=dict(_pair(each) for each in spark["conf"]),
            quick=quick and spark["master"].startswith("local"),
            progress=sys.stderr.isatty(),
            ship=spark["ship"],
        ),
        environment=os.environ,
    )
    try:
        with one_line():
            yield opened
    finally:
        stop_quietly(opened)


def _pair(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator:
        raise click.BadParameter(f"--conf is NAME=VALUE, not {text!r}")
    return name, value


# A few million events: from this size on, Java's optimizing compiler pays off.
_LARGE_BYTES = 32 << 20

Found = tuple["Audited", list[dict[str, Any]]]


def _is_large(history: Sequence[str], lake: str, *, full: bool) -> bool:
    """Whether the audit will take long, by the sizes of local files."""
    if history:
        paths = [Path(each) for each in history if "://" not in each]
        each_file = (file for path in paths for file in (path, *path.rglob("*.parquet")))
        return sum(file.stat().st_size for file in each_file if file.is_file()) > _LARGE_BYTES
    from tenure.pipeline.audit.lakes import bytes_to_read

    size = bytes_to_read(lake, full=full)
    return size is None or size > _LARGE_BYTES


def _audit_anything(
    spark: SparkSession,
    history: Sequence[str],
    lake: str,
    *,
    full: bool,
    quiesced: bool,
    partial: bool,
    show: int,
) -> Found:
    """The summary, and the first violations."""
    urls = [each for each in history if "+" in each.partition("://")[0]]
    files = [each for each in history if each not in urls]
    if urls and files:
        raise UsageError("audit either live queues or files, not both at once")
    if history:
        return _of_events(spark, urls, files, quiesced=quiesced, partial=partial, show=show)
    from tenure.pipeline.audit.lakes import audit_lake, violations
    from tenure.pipeline.lake import Lake

    audited = audit_lake(spark, lake, full=full, quiesced=quiesced)
    return audited, _shown(violations(spark, Lake(lake)), show)


def _of_events(
    spark: SparkSession,
    urls: Sequence[str],
    files: Sequence[str],
    *,
    quiesced: bool,
    partial: bool,
    show: int,
) -> Found:
    from tenure.pipeline.audit.explain import outbox_events
    from tenure.pipeline.audit.run import Audit, History, completed
    from tenure.pipeline.lake import file_events, journal_events
    from tenure.pipeline.source.offsets import all_journals, journal_name, open_reader

    unseen: frozenset[str] = frozenset()
    cut: list[str] = []
    if urls:
        events = journal_events(spark, urls)
        for url in all_journals(urls):
            reader = open_reader(url)
            # The beginning of a trimmed journal is gone.
            if reader.gone(reader.head()) != 0:
                cut.append(journal_name(url))
            reader.close()
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


_MARKS = {"BROKEN": "red", "sound": "green", "not seen": "dim"}


_lake_option = click.option(
    "--lake", default="lake", show_default=True, metavar="PATH", help="Folder or s3:// address."
)


def _urls(given: tuple[str, ...]) -> list[str]:
    config = load_config()
    return [config.url_of(each) for each in given] or [config.text("queue_url")]


@click.group("pipeline")
def pipeline_command() -> None:
    """Capture, count and audit the history of queues, on Spark.

    From a running `tenure up` to a report:

    \b
      tenure pipeline capture --once
      tenure pipeline audit
      tenure pipeline report
    """


@pipeline_command.command("capture")
@queues_option
@_lake_option
@click.option("--once", is_flag=True, help="Only what there is now.")
@click.option("--every", default=5.0, show_default=True, metavar="SECONDS", help="Between batches.")
@click.option(
    "--max-rows", default=1_000_000, show_default=True, help="Approximate rows of a batch."
)
@click.option("--with-payloads", is_flag=True, help="Keep payloads and results of ended jobs.")
@click.option("--redact", multiple=True, metavar="NAME", help="With payloads: a further secret.")
@click.option("--release", is_flag=True, help="End the capture: the store may trim again.")
@click.option("--reader", default="", metavar="NAME", help="With --release: of a lost lake.")
@_spark_options
@json_option
def capture_command(
    queue_urls: tuple[str, ...],
    lake: str,
    once: bool,
    every: float,
    max_rows: int,
    with_payloads: bool,
    redact: tuple[str, ...],
    release: bool,
    reader: str,
    as_json: bool,
    **spark: Any,
) -> None:
    """Follow the journals of queues into the lake, exactly once across any crash.

    Without --queue, the configured queue. A store trims a captured journal only behind what was
    captured. Events that were trimmed before they could be read are reported as a gap.
    Payloads are kept without secrets: by the names that `gateway.redact` and --redact add to
    the usual ones.
    """
    chosen = _urls(queue_urls)
    if redact and not with_payloads:
        raise click.UsageError("--redact is of --with-payloads; events hold no payload")
    secrets = [*load_config().texts("gateway.redact"), *redact] if with_payloads else None
    if reader and not release:
        raise click.UsageError("--reader names whom to --release; a lake has its name already")
    if release:
        from tenure.pipeline.capture import release as give_up

        give_up(chosen, lake, reader)
        note(f"released: the stores no longer wait for {reader or lake} when they trim")
        return
    with _session(spark) as opened:
        from tenure.pipeline.capture import capture

        if not once:
            note(f"capturing {len(chosen)} journal(s) every {every:g} s; Ctrl-C ends it")
        try:
            done = capture(
                opened, lake, chosen, once=once, every_s=every, max_rows=max_rows,
                secrets=secrets, tell=note,
            )  # fmt: skip
        except KeyboardInterrupt:
            note("stopped; the next capture goes on from here")
            return
    answer(as_json, done, f"{done.events:,} new events; {lake} holds {done.total:,}")


@pipeline_command.command("tables")
@_lake_option
@click.option("--scratch", is_flag=True, help="Rebuild them from all events.")
@click.option(
    "--target", "targets", multiple=True, metavar="[QUEUE=]SECONDS",
    help="What a job may take from submit to end, for the table slo.  [default: 60]",
)  # fmt: skip
@_spark_options
@json_option
def tables_command(
    lake: str, scratch: bool, targets: tuple[str, ...], as_json: bool, **spark: Any
) -> None:
    """Make attempts, jobs, hourly metrics and slo, or bring them up to date with the lake."""
    with _session(spark) as opened:
        done = _tables(opened, lake, scratch, targets)
    days = f"days {done.days[0]} to {done.days[-1]}" if done.days else "all days"
    answer(as_json, done, f"{lake}: {days} brought up to date" if done.is_new else "nothing new")


def _tables(spark: SparkSession, lake: str, scratch: bool, targets: tuple[str, ...]) -> Any:
    from tenure.pipeline.tables.update import update_tables

    targets_ms = dict(_target(each) for each in targets) if targets else None
    return update_tables(spark, lake, scratch=scratch, targets=targets_ms)


def _target(text: str) -> tuple[str, int]:
    queue, separator, seconds = text.rpartition("=")
    try:
        return (queue if separator else "", round(float(seconds) * 1000))
    except ValueError:
        raise click.BadParameter(f"--target is QUEUE=SECONDS or SECONDS, not {text!r}") from None


@pipeline_command.command("audit")
@click.argument("files", metavar="[FILE]...", nargs=-1)
@queues_option
@_lake_option
@click.option("--full", is_flag=True, help="All of the lake again, not only what is new.")
@click.option("--quiesced", is_flag=True, help="Everything had time to end: open jobs are lost.")
@click.option("--partial", is_flag=True, help="FILE begins in the middle: its first part is cut.")
@click.option("--show", default=20, show_default=True, help="How many violations to show.")
@_spark_options
@json_option
def audit_command(
    files: tuple[str, ...],
    queue_urls: tuple[str, ...],
    lake: str,
    full: bool,
    quiesced: bool,
    partial: bool,
    show: int,
    as_json: bool,
    **spark: Any,
) -> int:
    """Check the promises over the whole history; exit code 8 if one was broken.

    Without an argument, what is new in the lake. A --queue is audited live; a FILE (.parquet,
    .jsonl) may be of another system: see docs/howto/pipeline.md for its columns.
    """
    history = (*files, *(load_config().url_of(each) for each in queue_urls))
    with _session(spark, quick=not _is_large(history, lake, full=full or quiesced)) as opened:
        began = time.perf_counter()
        audited, rows = _audit_anything(
            opened, history, lake, full=full, quiesced=quiesced, partial=partial, show=show
        )
        took_s = time.perf_counter() - began
    if as_json:
        emit(msgspec.to_builtins(audited) | {"violations_shown": rows})
    else:
        _show_audit(audited, rows, took_s)
    return Exit.PROBLEMS if audited.violations else Exit.OK


def _show_audit(audited: Any, rows: list[dict[str, Any]], took_s: float) -> None:
    lines = [
        [
            each.invariant,
            paint(each.mark, _MARKS[each.mark]),
            f"{each.jobs:,}",
            f"{each.violations:,}",
            f"{each.unobserved:,}",
            f"{each.text} ({each.reason})" if each.reason else each.text,
        ]
        for each in audited.verdicts
    ]
    emit_text(table(["", "VERDICT", "JOBS", "VIOLATIONS", "NOT SEEN", "PROMISE"], lines))
    for row in rows:
        note(f"{row['invariant']} job {row['job_id'] or '-'}: {row['text']}")
    note(
        f"{audited.jobs:,} jobs, {audited.events:,} events, {audited.open_jobs:,} open, "
        f"{audited.begins_late:,} begin before the history, {audited.looked_at:,} looked at "
        f"closely; {took_s:.1f} s"
    )


@pipeline_command.command("check")
@_lake_option
@click.option(
    "--slo", "shares", multiple=True, metavar="[QUEUE=]SHARE",
    help="How many jobs must end well within their target, 0.99 say; repeatable.",
)  # fmt: skip
@json_option
def check_command(lake: str, shares: tuple[str, ...], as_json: bool) -> int:
    """Say what to page about; exit code 8 if there is something.

    Service levels of the newest day (see the table slo), and promises that the last audit found
    broken. It reads what `tables` and `audit` left, and starts no Spark.
    """
    from tenure.pipeline.lake import Lake
    from tenure.pipeline.report.figures import alerts

    found = alerts(Lake(lake), dict(_share(each) for each in shares))
    if as_json:
        emit({"alerts": found})
    else:
        for line in found:
            emit_text(line)
        note(f"{len(found)} to look at" if found else "all is well")
    return Exit.PROBLEMS if found else Exit.OK


def _share(text: str) -> tuple[str, float]:
    queue, separator, share = text.rpartition("=")
    try:
        wanted = float(share)
    except ValueError:
        wanted = -1
    if not 0 <= wanted <= 1:
        raise click.BadParameter(f"--slo is QUEUE=SHARE or SHARE, 0 to 1, not {text!r}")
    return (queue if separator else "", wanted)


@pipeline_command.command("forget")
@_lake_option
@queues_option
@click.option("--requester", default="", metavar="NAME", help="All jobs of this requester.")
@click.option("--job", "job_ids", multiple=True, metavar="ID", help="One job; repeatable.")
@click.option("--yes", is_flag=True, help="Do it: it cannot be undone.")
@json_option
def forget_command(
    lake: str,
    queue_urls: tuple[str, ...],
    requester: str,
    job_ids: tuple[str, ...],
    yes: bool,
    as_json: bool,
) -> None:
    """Erase the history of a requester's jobs, or of single jobs, from the lake.

    Jobs that have not ended stay. The stores say whose a job is: erase the history before they
    remove the jobs, or name jobs that they have removed by --job. It starts no Spark.
    """
    from tenure.pipeline.lake import Lake
    from tenure.pipeline.personal import forget

    if not requester and not job_ids:
        raise click.UsageError("name whose history to erase: --requester NAME or --job ID")
    if not yes:
        raise click.UsageError("it cannot be undone: add --yes")
    config = load_config()
    # A lake keeps no URL with a password; the configured one has it.
    urls = [*(config.url_of(each) for each in queue_urls), config.text("queue_url")]
    done = forget(Lake(lake), urls, requester=requester, job_ids=job_ids)
    answer(
        as_json,
        done,
        f"{done.jobs:,} jobs erased from {lake}, {done.rows:,} rows; "
        f"{done.open_jobs:,} have not ended and stay",
    )


@pipeline_command.command("enqueue")
@click.option("--from", "source", required=True, metavar="FILE", help="Parquet, JSON lines, CSV.")
@click.option("--task", required=True)
@queue_option
@click.option("--key", multiple=True, metavar="COLUMN", help="Identifies a row; repeatable.")
@click.option("--payload", default="", metavar="COLUMN", help="Holds the payload as JSON.")
@click.option("--run", default="", help="Another name submits the same rows again.")
@click.option("--rate", default=0.0, help="Jobs per second at most.")
@click.option("--tasks", default=8, show_default=True, help="Concurrent Spark tasks.")
@click.option("--dry-run", is_flag=True, help="Only count, and show the first jobs.")
@_spark_options
@json_option
def enqueue_command(
    source: str,
    task: str,
    queue_url: str | None,
    key: tuple[str, ...],
    payload: str,
    run: str,
    rate: float,
    tasks: int,
    dry_run: bool,
    as_json: bool,
    **spark: Any,
) -> int:
    """Submit a job for every row of a file; started again, it continues."""
    from tenure.core.registry import parse_url

    target = load_config().text("queue_url", queue_url)
    with _session(spark) as opened:
        from tenure.pipeline.enqueue import enqueue, jobs_of, read_rows, run_name

        where = str(Path(source).absolute()) if "://" not in source else source
        name = run or run_name(where, task, parse_url(target).safe)
        rows = read_rows(opened, source)
        jobs = jobs_of(rows, task=task, run=name, key=key, payload=payload)
        note(f"{rows.count():,} rows become jobs of {task!r} in {parse_url(target).safe}")
        if dry_run:
            for row in jobs.limit(3).collect():
                emit({"job_id": row.job_id, "task": row.task, "payload": row.payload})
            return Exit.OK
        began = time.perf_counter()
        tally = enqueue(jobs, target, rate=rate, tasks=tasks)
        took_s = time.perf_counter() - began
    if as_json:
        emit(msgspec.to_builtins(tally) | {"seconds": round(took_s, 3)})
    else:
        emit_text(
            f"{tally.created:,} new, {tally.replayed:,} were there, {tally.refused:,} refused; "
            f"{(tally.created + tally.replayed) / max(took_s, 1e-9):,.0f} a second"
        )
        for reason in tally.reasons:
            note(f"tenure: {reason}")
    return Exit.CONFLICT if tally.refused else Exit.OK


@pipeline_command.command("replay")
@click.option("--where", required=True, metavar="SQL", help="On the columns of the table jobs.")
@_lake_option
@queues_option
@click.option("--to", default="", metavar="QUEUE", help="Another queue; default: their own.")
@click.option("--rate", default=0.0, help="Jobs per second at most.")
@click.option("--yes", is_flag=True, help="Do it; without, only count.")
@_spark_options
@json_option
def replay_command(
    where: str,
    lake: str,
    queue_urls: tuple[str, ...],
    to: str,
    rate: float,
    yes: bool,
    as_json: bool,
    **spark: Any,
) -> int:
    """Send ended jobs back to their queue, or to another one: chosen by a condition.

    \b
      tenure pipeline replay --where "error_code = '503' and day >= '2026-11-01'"
    """
    config = load_config()
    urls = tuple(config.url_of(each) for each in queue_urls)
    to = config.url_of(to) if to else ""
    with _session(spark) as opened:
        from tenure.pipeline import replay as replaying
        from tenure.pipeline.lake import Lake

        files = Lake(lake)
        files.require()
        _tables(opened, lake, False, ())  # else what was captured since would not be found
        rows = replaying.chosen(opened, files, where)
        counts = replaying.counted(rows)
        if not as_json or not yes:
            _show_choice(counts, as_json)
        if not yes or not counts:
            note("nothing was sent; --yes does it" if counts else "no job is like that")
            return Exit.OK if counts else Exit.NOT_FOUND
        done = replaying.replay(rows, replaying.sources(files, urls), to=to, rate=rate)
    counted = f"{done.again:,} run again, {done.changed:,} had changed, "
    counted += f"{done.missing:,} are gone, {done.refused:,} refused"
    answer(as_json, done, counted)
    return Exit.CONFLICT if done.refused else Exit.OK


def _show_choice(counts: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        for row in counts:
            emit(row)
        return
    names = ("contract", "queue", "task", "state", "error_code", "count")
    lines = [[str(row[name]) for name in names] for row in counts]
    emit_text(table(["CONTRACT", "QUEUE", "TASK", "STATE", "ERROR", "JOBS"], lines))


@pipeline_command.command("report")
@_lake_option
@click.option("--out", default="report.html", show_default=True, metavar="FILE")
@_spark_options
def report_command(lake: str, out: str, **spark: Any) -> None:
    """Bring the tables up to date and write one page with charts, complete in itself."""
    with _session(spark) as opened:
        _tables(opened, lake, False, ())
        from tenure.pipeline.report.figures import figures_of
        from tenure.pipeline.report.page import page

        text = page(figures_of(opened, lake))
    Path(out).write_text(text)
    emit_text(out)
