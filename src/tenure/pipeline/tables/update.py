"""Updates the tables from the lake: reads only new events and leaves old days unchanged.

Rows of open jobs and attempts are merged with the new events, and move to the day on which they
end. An ended job that was sent back is removed from its old day. An update from scratch does the
same without old tables, and gives equal tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec
from pyspark.sql import functions as F  # noqa: N812

from tenure.pipeline.events import lake_events, positions_after
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.layout import EventFile, event_files
from tenure.pipeline.lake.progress import committed as committed
from tenure.pipeline.tables import attempts, jobs, manifest
from tenure.pipeline.tables.manifest import Manifest, read_manifest
from tenure.pipeline.tables.metrics import latency_hourly, metrics_hourly, slo
from tenure.pipeline.tables.reading import learn, read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OPEN = "open"
Files = dict[str, list[str]]


class Updated(msgspec.Struct, frozen=True, kw_only=True):
    """What a run did."""

    run: int
    days: list[str]
    is_new: bool


def update_tables(
    spark: SparkSession,
    lake_path: str,
    *,
    scratch: bool = False,
    targets: Mapping[str, int] | None = None,
) -> Updated:
    """Make the tables of a lake, or bring them up to date; `targets` see `metrics.slo`."""
    lake = LakeFiles(lake_path)
    lake.require()
    manifest.sweep(lake)
    before = read_manifest(lake)
    known = Manifest(run=before.run) if scratch else before
    wanted = dict(targets) if targets is not None else known.targets
    now = committed(lake)
    settled = [file for file in event_files(lake) if file.upto <= now.get(file.journal, 0)]
    files = [file for file in settled if file.upto > known.places.get(file.journal, 0)]
    if not files and wanted == known.targets and known.files:
        return Updated(run=before.run, days=[], is_new=False)
    run = _Run(spark, lake, known, settled, before.run + 1)
    made = run.make(files, wanted, all_days=wanted != known.targets)
    manifest.write_manifest(lake, msgspec.structs.replace(made, places=now, targets=wanted))
    manifest.sweep(lake)
    return Updated(run=before.run + 1, days=run.days, is_new=True)


class _Run:
    """One run; `days` grows with what it touched."""

    def __init__(
        self,
        spark: SparkSession,
        lake: LakeFiles,
        known: Manifest,
        settled: list[EventFile],
        number: int,
    ) -> None:
        self._spark = spark
        self._lake = lake
        self._known = known
        self._settled = settled
        self._taken_out: list[DataFrame] = []
        self._number = number
        self.days: list[str] = []

    def make(self, files: list[EventFile], targets: dict[str, int], *, all_days: bool) -> Manifest:
        new = positions_after(lake_events(self._spark, self._lake, files), self._known.places)
        tables = {name: dict(by_day) for name, by_day in self._known.files.items()}
        tables["attempts"] = self._attempts(new)
        tables["jobs"] = self._jobs(new)
        touched = {file.day for file in files}
        for name in ("attempts", "jobs"):
            old = self._known.files.get(name, {})
            touched |= {day for day, paths in tables[name].items() if old.get(day) != paths}
            touched |= old.keys() - tables[name].keys()
        self.days = sorted(touched - {OPEN})
        current = Manifest(files=tables)
        for name, rows in self._figures(current).items():
            tables[name] = self._replaced(name, tables.get(name, {}), rows)
        slo_days = sorted(set(tables["jobs"]) - {OPEN}) if all_days else self.days
        rows = slo(self._read("jobs", current.of("jobs", slo_days)), targets)
        kept = {} if all_days else tables.get("slo", {})
        tables["slo"] = self._replaced("slo", kept, rows, slo_days)
        return Manifest(run=self._number, files=tables)

    def _attempts(self, new: DataFrame) -> Files:
        parts = attempts.attempts_of(new)
        old = self._known.files.get("attempts", {})
        if OPEN in old:
            carried = self._read("attempts", old[OPEN]).select(*attempts.COLUMNS)
            parts = attempts.merged(parts.select(*attempts.COLUMNS).unionByName(carried))
        return self._added("attempts", old, attempts.shown(parts))

    def _jobs(self, new: DataFrame) -> Files:
        parts = jobs.jobs_of(new)
        old = dict(self._known.files.get("jobs", {}))
        columns = [*jobs.KEYS, *jobs.LEAST, *jobs.GREATEST, *jobs.SUMS]
        if not old:
            return self._added("jobs", old, jobs.shown(parts))
        parts = parts.select(*columns).cache()
        carried = self._read("jobs", old[OPEN]).select(*columns) if OPEN in old else None
        old = self._reopened(parts, carried, old)
        sources = [parts, *([carried] if carried is not None else [])]
        sources += [rows.select(*columns) for rows in self._taken_out]
        whole = sources[0]
        for rows in sources[1:]:
            whole = whole.unionByName(rows)
        made = self._added("jobs", old, jobs.shown(jobs.merged(whole)))
        parts.unpersist()
        return made

    def _reopened(self, parts: DataFrame, carried: DataFrame | None, old: Files) -> Files:
        """Remove jobs that were sent back after their end from the days in which they ended."""
        late = parts.where(F.col("first_ver") > 1).select(*jobs.KEYS)
        if carried is not None:
            late = late.join(carried.select(*jobs.KEYS), list(jobs.KEYS), "left_anti")
        closed = {day: paths for day, paths in old.items() if day != OPEN}
        if not closed or late.isEmpty():
            return old
        paths = [path for each in closed.values() for path in each]
        found = self._read("jobs", paths).join(F.broadcast(late), list(jobs.KEYS), "left_semi")
        days = [row.day for row in found.select("day").distinct().collect()]
        if not days:
            return old
        self._taken_out.append(found)
        rest = self._read("jobs", [path for day in days for path in closed[day]]).join(
            F.broadcast(late), list(jobs.KEYS), "left_anti"
        )
        written = manifest.store(self._lake, self._number, "jobs", rest, mark="r")
        return {day: p for day, p in old.items() if day not in days} | written

    def _figures(self, current: Manifest) -> dict[str, DataFrame]:
        done = self._read("attempts", current.of("attempts", self.days))
        ended = self._read("jobs", current.of("jobs", self.days))
        of_days = [file for file in self._settled if file.day in self.days]
        events = lake_events(self._spark, self._lake, of_days)
        return {
            "metrics_hourly": metrics_hourly(done, ended, events),
            "latency_hourly": latency_hourly(done, ended),
        }

    def _added(self, name: str, old: Files, rows: DataFrame) -> Files:
        """Add ended rows to their day; open rows replace the earlier open rows."""
        learn(name, rows)
        new = manifest.store(self._lake, self._number, name, rows)
        merged = {day: list(paths) for day, paths in old.items() if day != OPEN}
        for day, paths in new.items():
            merged[day] = [
                *merged.get(day, []),
                *(p for p in paths if p not in merged.get(day, [])),
            ]
        return merged

    def _replaced(
        self, name: str, old: Files, rows: DataFrame, days: list[str] | None = None
    ) -> Files:
        learn(name, rows)
        touched = self.days if days is None else days
        kept = {day: paths for day, paths in old.items() if day not in touched}
        rows = rows.where(F.col("day").isin(touched)) if touched else rows.limit(0)
        return kept | manifest.store(self._lake, self._number, name, rows)

    def _read(self, name: str, paths: list[str]) -> DataFrame:
        return read(self._spark, self._lake, name, paths)
