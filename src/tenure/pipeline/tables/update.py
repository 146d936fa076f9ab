"""Runs the SQL files of this folder and keeps their tables up to date.

The first lines of a file say what a row is and how its table is updated:

    -- update: merge KEY, ...   rows of one key are merged with those of new events; a row has the
                                day on which it ended, or `open`, and only open rows are read again
    -- update: day              made anew for the days that new events touch
    -- update: view of TABLE    not stored: a question to a table, for the catalog (`register`)

What a file can select from: `new_events` (those that the table lacks, with `from_kind` and
`to_kind`: waiting, running, final), `carried` (rows of the table that may go on), and of the days
in question `events`, `attempts`, `jobs`; `targets`. A new file is a new table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema

from tenure.pipeline.delta_rs import source_of
from tenure.pipeline.lake import Lake, between, day_of, lake_events, with_kinds
from tenure.store.files import package_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OPEN = "open"
DATABASE = "tenure"
TARGET_MS = 60_000
_TARGETS = "tenure.targets"
_UPDATE = "-- update: "
Positions = Mapping[str, int]


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did: the days that changed."""

    days: list[str]
    is_new: bool


class TableFile(msgspec.Struct, frozen=True, kw_only=True):
    """One SQL file: its table is updated by `merge` (by the key `of`), by `day`, or a `view`."""

    name: str
    sql: str
    kind: str
    of: tuple[str, ...]


@cache
def sql_files() -> tuple[TableFile, ...]:
    """All of them; first those by key, from which the others are made."""
    found = []
    for path in package_folder("tenure.pipeline.tables").iterdir():
        if path.name.endswith(".sql"):
            sql = path.read_text()
            (how,) = [line for line in sql.splitlines() if line.startswith(_UPDATE)]
            kind, _, words = how.removeprefix(_UPDATE).partition(" ")
            of = tuple(word.strip() for word in words.removeprefix("of ").split(","))
            found.append(TableFile(name=path.name.removesuffix(".sql"), sql=sql, kind=kind, of=of))
    return tuple(sorted(found, key=lambda file: (file.kind != "merge", file.name)))


def table_files() -> tuple[TableFile, ...]:
    """Those whose tables are stored."""
    return tuple(file for file in sql_files() if file.kind != "view")


def update_tables(
    spark: SparkSession,
    address: str,
    *,
    scratch: bool = False,
    targets: Mapping[str, int] | None = None,
) -> Updated:
    """Make the tables of a lake, or bring them up to date.

    `targets` maps queues to milliseconds from submit to end, for the table `slo`; "" is for all
    others. They are kept for later runs.
    """
    lake = Lake(address)
    lake.require()
    upto = lake.events.positions(list(lake.journals()))
    days: set[str] = set()
    in_step = not scratch and _in_step(lake, list(upto))
    for file in table_files():
        if file.kind == "merge":
            days |= merge(spark, lake, file, upto, scratch=scratch)
    wanted, is_other = _targets(lake, targets)
    by_day = [file for file in table_files() if file.kind == "day"]
    if days or not in_step:
        some = sorted(days) if in_step else None
        _give_views(spark, lake, upto, some, wanted)
        for file in by_day:
            _replace(spark, lake, file, upto, some)
    if is_other:
        _give_views(spark, lake, upto, None, wanted)
        _replace(spark, lake, next(file for file in by_day if file.name == "slo"), upto, None)
        lake.table("slo").set_properties({_TARGETS: msgspec.json.encode(wanted).decode()})
    for file in table_files():
        lake.table(file.name).tidy()
    return Updated(days=sorted(days), is_new=bool(days) or is_other or not in_step)


def register(spark: SparkSession, address: str) -> None:
    """Make the tables of a lake known to the session's catalog, in the database `tenure`.

    A query reads the newest version of a table. Views (`-- update: view of TABLE`) are among them.
    """
    lake = Lake(address)
    lake.require()
    spark.sql(f"create database if not exists {DATABASE}")
    there = lake.tables()
    for name in there:
        spark.sql(f"drop table if exists {DATABASE}.{name}")  # nosec B608 # a folder of the lake
        source = source_of(f"{DATABASE}_lake_{name}", lake.table(name).options)
        spark.dataSource.register(source)
        spark.catalog.createTable(f"{DATABASE}.{name}", source=source.name())
    for file in sql_files():
        if file.kind == "view" and file.of[0] in there:
            spark.sql(f"create or replace view {DATABASE}.{file.name} as {file.sql}")


def _in_step(lake: Lake, journals: Sequence[str]) -> bool:
    """Whether all tables go equally far; if not, a run was killed and days are missing."""
    known = [lake.table(file.name) for file in table_files()]
    if any(table.opened() is None for table in known):
        return False
    positions = [table.positions(journals) for table in known]
    return all(each == positions[0] for each in positions)


def merge(
    spark: SparkSession, lake: Lake, file: TableFile, upto: Positions, *, scratch: bool
) -> set[str]:
    """Merge new events into a table by key; the days that changed."""
    table = lake.table(file.name)
    there = {} if scratch else table.parts()
    after = table.positions(list(upto))
    begin = dict.fromkeys(upto, 0) if scratch else after
    if begin == upto:
        return set()
    new = with_kinds(lake_events(spark, lake, between(begin, upto)))
    new.createOrReplaceTempView("new_events")
    carried = table.read(spark, f"day = '{OPEN}'") if OPEN in there else None
    late, late_days = (
        _late(spark, lake, file, new, carried) if set(there) - {OPEN} else (None, set[str]())
    )
    rest: DataFrame | None = None
    if late is not None:
        # Ended rows that go on leave their days, which are written again without them.
        days = ", ".join(f"'{day}'" for day in late_days)
        old = table.read(spark, f"day in ({days})")
        rest = old.join(F.broadcast(late), list(file.of), "left_anti")
        moved = old.join(F.broadcast(late), list(file.of), "left_semi")
        carried = moved if carried is None else carried.unionByName(moved)
    rows = selected(spark, file, carried)
    table.create(to_arrow_schema(rows.schema), "day")
    remove = [*late_days, OPEN] if not scratch else list(table.parts())
    table.write(
        rows if rest is None else rows.unionByName(rest),
        after=after, upto=upto, remove=remove, partition_by="day",
    )  # fmt: skip
    touched = new.select(day_of(F.col("ts_ms")).alias("day")).distinct().collect()
    return {row.day for row in touched} | late_days


def selected(spark: SparkSession, file: TableFile, carried: DataFrame | None = None) -> DataFrame:
    """The result of a file; without rows to carry, `carried` has its columns and no rows."""
    if file.kind == "day":
        return spark.sql(file.sql)
    if carried is None:
        spark.sql(_without_carried(file.sql)).limit(0).createOrReplaceTempView("carried")
    else:
        carried.createOrReplaceTempView("carried")
    return spark.sql(file.sql)


def _without_carried(sql: str) -> str:
    """The same query before there is a table: it has nothing to carry."""
    head, _, tail = sql.rpartition("union all")
    return head + tail.partition("from carried")[2]


def _late(
    spark: SparkSession, lake: Lake, file: TableFile, new: DataFrame, carried: DataFrame | None
) -> tuple[DataFrame | None, set[str]]:
    """The keys of ended rows that new events continue, and their days."""
    key = list(file.of)
    if "first_ver" not in lake.table(file.name).read(spark).columns:
        return None, set()
    going = new.where("ver > 0").groupBy(*key).agg(F.min("ver").alias("first")).where("first > 1")
    if carried is not None:
        going = going.join(carried.select(*key), key, "left_anti")
    if going.isEmpty():
        return None, set()
    ended = lake.table(file.name).read(spark).where(F.col("day") != OPEN)
    late = ended.join(going.select(*key), key, "left_semi").select(*key, "day").cache()
    days = {row.day for row in late.select("day").distinct().collect()}
    return (late.drop("day") if days else None), days


def _replace(
    spark: SparkSession, lake: Lake, file: TableFile, upto: Positions, days: Sequence[str] | None
) -> None:
    """Make some days of a table anew; None: all of them."""
    table = lake.table(file.name)
    rows = selected(spark, file)
    table.create(to_arrow_schema(rows.schema), "day")
    if days is not None:
        rows = rows.where(F.col("day").isin(list(days)))
    table.write(
        rows,
        after=table.positions(list(upto)), upto=upto, partition_by="day",
        remove=list(table.parts()) if days is None else days,
    )  # fmt: skip


def _give_views(
    spark: SparkSession,
    lake: Lake,
    upto: Positions,
    days: Sequence[str] | None,
    targets: Mapping[str, int],
) -> None:
    """`events`, `attempts` and `jobs` of some days, and `targets`."""
    where = "" if days is None else f"day in ({', '.join(repr(day) for day in days)})"
    for name in ("attempts", "jobs"):
        lake.table(name).read(spark, where).createOrReplaceTempView(name)
    span = _span(days)
    events = lake_events(spark, lake, f"({between(dict.fromkeys(upto, 0), upto)}){span}")
    if days is not None:
        events = events.where(day_of(F.col("ts_ms")).isin(list(days)))
    events.createOrReplaceTempView("events")
    rows = [{"queue": queue, "target_ms": ms} for queue, ms in targets.items()]
    spark.createDataFrame(rows, "queue string, target_ms bigint").createOrReplaceTempView("targets")


def _span(days: Sequence[str] | None) -> str:
    """The times of some days, by which files are skipped."""
    if not days:
        return ""
    from datetime import UTC, datetime

    first, last = (datetime.fromisoformat(f"{day}T00:00:00").replace(tzinfo=UTC) for day in
                   (min(days), max(days)))  # fmt: skip
    begin, end = int(first.timestamp() * 1000), int(last.timestamp() * 1000) + 86_400_000
    return f" and ts_ms >= {begin} and ts_ms < {end}"


def _targets(lake: Lake, given: Mapping[str, int] | None) -> tuple[dict[str, int], bool]:
    """The targets to use, and whether they are others than before."""
    kept = msgspec.json.decode(lake.table("slo").properties().get(_TARGETS) or "{}")
    before: dict[str, int] = {"": TARGET_MS} | kept
    wanted = before if given is None else {"": TARGET_MS} | dict(given)
    return wanted, wanted != before
