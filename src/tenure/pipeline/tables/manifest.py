"""The list of the files of all tables, replaced atomically.

A run writes its files beside the old ones and then replaces the list, so readers of the list see
the tables either before or after the run. Files that are not in the list were left by a run that
was killed; the next run removes them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from tenure.pipeline.lake.files import LakeFiles

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

TABLES = "tables"
NAMES = ("attempts", "jobs", "metrics_hourly", "latency_hourly", "slo")
_MANIFEST = f"{TABLES}/_manifest.json"
_NEW = f"{TABLES}/_new"


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The tables as one run left them: files by table and day, and how far they go.

    `places` has the position in each journal up to which its events are in the tables.
    """

    run: int = 0
    places: dict[str, int] = {}
    targets: dict[str, int] = {}
    files: dict[str, dict[str, list[str]]] = {}

    def of(self, table: str, days: Iterable[str] | None = None) -> list[str]:
        """The files of a table, of all days or some."""
        by_day = self.files.get(table, {})
        wanted = by_day if days is None else [day for day in days if day in by_day]
        return [path for day in wanted for path in by_day[day]]

    def days(self, table: str) -> list[str]:
        """The days a table has."""
        return sorted(self.files.get(table, {}))


def read_manifest(lake: LakeFiles) -> Manifest:
    """The current list; an empty one before the first run."""
    kept = lake.read_json(_MANIFEST)
    return msgspec.convert(kept, Manifest) if kept is not None else Manifest()


def write_manifest(lake: LakeFiles, manifest: Manifest) -> None:
    """From now on these are the tables."""
    lake.write_json(_MANIFEST, manifest)


def sweep(lake: LakeFiles) -> None:
    """Remove files that are not in the list."""
    manifest = read_manifest(lake)
    lake.remove(_NEW)
    for table in NAMES:
        named = set(manifest.of(table))
        for folder in lake.names(f"{TABLES}/{table}"):
            for name in lake.names(f"{TABLES}/{table}/{folder}"):
                path = f"{TABLES}/{table}/{folder}/{name}"
                if path not in named:
                    lake.remove(path)


def store(
    lake: LakeFiles, run: int, table: str, rows: DataFrame, *, mark: str = ""
) -> dict[str, list[str]]:
    """Write rows with a column `day` and move the files to their folders; their paths by day.

    `mark` tells several writes of one run apart.
    """
    draft = f"{_NEW}/{run}{mark}/{table}"
    rows.write.mode("overwrite").partitionBy("day").parquet(lake.uri(draft))
    found: dict[str, list[str]] = {}
    for folder in lake.names(draft):
        day = folder.removeprefix("day=")
        if day == folder:
            continue
        for number, name in enumerate(lake.names(f"{draft}/{folder}")):
            if name.endswith(".parquet"):
                path = f"{TABLES}/{table}/{folder}/{run:06d}{mark}-{number:04d}.parquet"
                lake.move(f"{draft}/{folder}/{name}", path)
                found.setdefault(day, []).append(path)
    return found
