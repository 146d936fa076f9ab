"""One table of the lake: read it, add to it, replace a part of it, tidy it.

This is all that the pipeline asks of a table format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyspark.sql.pandas.types import from_arrow_schema

from tenure.pipeline.lake.delta_rs import (
    DeltaWriter,
    arrow_schema,
    base_of,
    commit,
    file_system,
    open_table,
    positions_of,
    units_of,
)
from tenure.pipeline.schema import ARROW
from tenure.pipeline.source.offsets import epoch_name

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, DataFrameWriter, SparkSession

_TARGET_BYTES = 256 << 20
_FILES_MANY = 64
_KEEP_HOURS = 7 * 24


class Table:
    """A Delta table by its address. `storage` are the options of its bucket.

    `positions` say up to which position of each journal the rows of the table go. Every write names
    those it builds upon and those it reaches: so a write that is repeated, or that another one
    overtook, is refused.
    """

    def __init__(self, uri: str, storage: Mapping[str, str]) -> None:
        self.uri = uri
        self._options = {"path": uri, "storage": msgspec.json.encode(storage).decode()}
        self._is_disk = "://" not in uri

    def opened(self) -> DeltaTable | None:
        """The newest version; None if the table does not exist."""
        try:
            return open_table(self._options)
        except TableNotFoundError:
            return None

    def create(self, schema: pa.Schema, partition_by: str) -> None:
        """Make the table unless it is there; a column that it lacks is added."""
        storage = msgspec.json.decode(self._options["storage"])
        table = DeltaTable.create(
            self.uri, schema, mode="ignore", partition_by=partition_by, storage_options=storage
        )
        known = set(arrow_schema(table).names)
        new = [field for field in schema if field.name not in known]
        if new:
            table.alter.add_columns(Schema.from_arrow(pa.schema(new)).fields)

    def positions(self, journals: Sequence[str]) -> dict[str, int]:
        """Up to where the table goes in these journals; 0: nothing of it is there."""
        table = self.opened()
        return positions_of(table, list(journals)) if table else dict.fromkeys(journals, 0)

    def epoch(self, journal: str) -> int:
        """The last epoch of a journal of which the table has something; -1: of none."""
        table, epoch = self.opened(), -1
        while table and table.transaction_version(epoch_name(journal, epoch + 1)) is not None:
            epoch += 1
        return epoch

    def units(self, journal: str) -> int:
        """How many units of a journal were read or lost up to the table's position; -1: unknown."""
        table = self.opened()
        return units_of(table, journal) if table else -1

    def begins_late(self, journal: str) -> bool:
        """Whether events of a journal were removed before it was first read."""
        table = self.opened()
        return table is not None and base_of(table, journal) > 0

    def size(self, where: str) -> int:
        """How many bytes the files have that `read` would read."""
        table = self.opened()
        if table is None:
            return 0
        chosen = table.file_uris(file_pruning_predicate=where)
        return sum(Path(uri).stat().st_size for uri in chosen)

    def parts(self) -> dict[str, int]:
        """How many rows each value of the partition column has."""
        table = self.opened()
        if table is None:
            return {}
        found: dict[str, int] = {}
        (column,) = table.metadata().partition_columns
        for each in pa.table(table.get_add_actions(flatten=True)).to_pylist():
            value = each[f"partition.{column}"]
            found[value] = found.get(value, 0) + each["num_records"]
        return found

    def rows(self, where: Sequence[tuple[str, str, Any]] = ()) -> list[dict[str, Any]]:
        """All rows of the partitions that `where` chooses, read without Spark."""
        table = self.opened()
        if table is None:
            return []
        files = table.to_pyarrow_dataset(
            filesystem=file_system(self._options), file_pruning_predicate=list(where) or None
        )
        found: list[dict[str, Any]] = files.to_table().to_pylist()
        return found

    def read(self, spark: SparkSession, where: str = "") -> DataFrame:
        """The rows; of those that `where` chooses, only files that may have some are read."""
        table = self.opened()
        if table is None:
            raise FileNotFoundError(self.uri)
        schema = from_arrow_schema(arrow_schema(table))
        if self._is_disk:
            uris = [
                f"file://{uri}" for uri in table.file_uris(file_pruning_predicate=where or None)
            ]
            if not uris:
                return spark.createDataFrame([], schema)
            # Spark's own reader; with a schema it does not open files to find one.
            rows = spark.read.schema(schema).option("basePath", f"file://{self.uri}").parquet(*uris)
            rows = rows.select(*schema.names)
        else:
            reader = spark.read.format("delta-rs").options(**self._options)
            rows = reader.option("where", where).load()
        return rows.where(where) if where else rows

    def write(
        self,
        rows: DataFrame,
        *,
        after: Mapping[str, int],
        upto: Mapping[str, int],
        remove: Sequence[str] = (),
        partition_by: str,
    ) -> None:
        """Add rows, and remove those of some partitions, in one commit."""
        writer = self._writer(rows, partition_by)
        writer = writer.option("after", msgspec.json.encode(after).decode())
        writer = writer.option("upto", msgspec.json.encode(upto).decode())
        writer.option("remove", msgspec.json.encode(list(remove)).decode()).save()

    def put(self, rows: pa.Table, partition_by: str) -> None:
        """Add a few rows, without Spark."""
        self._put(rows.to_batches(), rows.schema, {"partition_by": partition_by, "upto": "{}"})

    def put_events(self, batches: Iterable[pa.RecordBatch]) -> None:
        """As `append_events`, without Spark."""
        self._put(batches, ARROW.remove_metadata(), {"partition_by": "journal"})

    def remove_all_but(self, kept: Sequence[str]) -> None:
        """Remove the rows of all partitions but some."""
        gone = [value for value in self.parts() if value not in kept]
        if gone:
            commit(self._options, [], after={}, upto={}, removed=gone)

    def append_events(self, rows: DataFrame) -> None:
        """Add events, with the rows of type `offset` that say where they begin and end."""
        self._writer(rows, "journal").save()

    def _put(
        self, batches: Iterable[pa.RecordBatch], schema: pa.Schema, options: Mapping[str, str]
    ) -> None:
        writer = DeltaWriter({**self._options, **options}, schema)
        writer.commit([writer.write(iter(batches))])

    def _writer(self, rows: DataFrame, partition_by: str) -> DataFrameWriter:
        writer = rows.write.format("delta-rs").options(**self._options).mode("append")
        return writer.option("partition_by", partition_by)

    def properties(self) -> dict[str, str]:
        """The properties of the table."""
        table = self.opened()
        return table.metadata().configuration if table is not None else {}

    def set_properties(self, properties: Mapping[str, str]) -> None:
        """Keep properties with the table; nothing is written if it has them."""
        table = self.opened()
        if table is not None and not properties.items() <= table.metadata().configuration.items():
            table.alter.set_table_properties(dict(properties), raise_if_not_exists=False)

    def tidy(self) -> None:
        """Make large files of many small ones, and remove those that nobody can be reading."""
        table = self.opened()
        if table is None or len(table.file_uris()) < _FILES_MANY:
            return
        # It can wait: the next one has the same to do.
        with suppress(DeltaError, OSError):
            self.optimize()
            self.vacuum(_KEEP_HOURS)

    def optimize(self) -> None:
        """Make large files of small ones; readers of older versions are not disturbed."""
        table = self.opened()
        if table is not None:
            table.optimize.compact(target_size=_TARGET_BYTES)

    def vacuum(self, hours: int) -> list[str]:
        """Remove files that no version of the last hours names."""
        table = self.opened()
        if table is None:
            return []
        return table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
