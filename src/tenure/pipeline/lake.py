"""The lake: a folder or bucket of Delta tables, and its events as a DataFrame.

    events              every event, by journal; rows of type `gap` under the journal `gaps`
    attempts, jobs ...  made from the events by the files of `tables`
    violations, audit_runs, audit_open      what audits found, their summaries, and what they carry

`Lake` knows where a lake is and `Table` what can be done with a table: read it, add to it, replace
a part of it, tidy it. This is all that the pipeline asks of a table format; `delta_rs` answers it.
Every table knows up to which position of each journal its rows go.

Events come from the lake, a live journal, or a history file, with the same columns. Columns that
the history of another system lacks are null, and the audit says what it could not check for that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema

from tenure.core.errors import NotFound, UsageError
from tenure.core.registry import machines
from tenure.pipeline.delta_rs import (
    DeltaWriter,
    arrow_schema,
    base_of,
    commit,
    file_system,
    open_table,
    positions_of,
    units_of,
)
from tenure.pipeline.schema import ARROW, COLUMNS, DDL, GAPS, NAMES
from tenure.pipeline.source.offsets import Gap, epoch_name
from tenure.store.files import private_folder

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, DataFrameWriter, SparkSession


EVENTS = "events"
_OLD_LABEL = "lake.json"
_SCHEMES = ("s3", "s3a")


class Lake:
    """The tables of one lake. Keys of a bucket are in its address or in the environment."""

    def __init__(self, address: str) -> None:
        self.name = re.sub(r"(://[^/?]*?):[^/?]*@", r"\1:***@", address)
        address = address.removeprefix("file://")
        self.is_disk = "://" not in address
        self._storage: dict[str, str] = {}
        if self.is_disk:
            self._root = str(Path(address).absolute())
        else:
            self._root, self._storage = _bucket(address)

    @property
    def _root_options(self) -> dict[str, str]:
        return {"uri": self._root, "storage": msgspec.json.encode(self._storage).decode()}

    def table(self, name: str) -> Table:
        """A table by its name, whether it exists or not."""
        return Table(f"{self._root}/{name}", self._storage)

    @property
    def events(self) -> Table:
        """The table of events."""
        return self.table(EVENTS)

    def begin(self) -> None:
        """Make it a lake; refuses a folder with other files."""
        self._refuse_old()
        if self.is_disk:
            folder = Path(self._root)
            if folder.is_dir() and any(folder.iterdir()) and not (folder / EVENTS).is_dir():
                raise UsageError(f"{self.name} holds other files; a lake needs an empty folder")
            private_folder(folder, mark="*")
        self.events.create(ARROW.remove_metadata(), "journal")

    def require(self) -> None:
        """Refuse what is no lake."""
        self._refuse_old()
        if self.events.opened() is None:
            raise NotFound(
                f"{self.name} is no lake; "
                f"`tenure pipeline capture --lake {self.name} --queue URL` makes one"
            )

    def _refuse_old(self) -> None:
        """A lake of plain files must not become a table: `vacuum` would remove its events."""
        if self.events.opened() is not None:
            return
        if file_system(self._root_options).get_file_info(_OLD_LABEL).is_file:
            raise UsageError(
                f"{self.name} is a lake of an older version, of plain Parquet files; capture into "
                f"a new folder, and audit this one with `tenure pipeline audit {self.name}/events`"
            )

    def tables(self) -> list[str]:
        """The names of the tables that exist."""
        found = file_system(self._root_options).get_file_info(fs.FileSelector(""))
        names = sorted(each.base_name for each in found if each.type == fs.FileType.Directory)
        return [name for name in names if self.table(name).opened() is not None]

    def read(self, spark: SparkSession, name: str) -> DataFrame:
        """A table that `tables` made."""
        if self.table(name).opened() is None:
            raise NotFound(
                f"there is no table {name!r} in {self.name}; "
                f"`tenure pipeline tables --lake {self.name}` makes them"
            )
        return self.table(name).read(spark)

    def consumer(self) -> str:
        """The name under which stores know this lake; "" if nothing was ever captured into it."""
        table = self.events.opened()
        if table is None:
            return ""
        return f"{self._root.rpartition('/')[2]}-{str(table.metadata().id)[:8]}"

    def journals(self) -> dict[str, int]:
        """The journals of which it has events, and how many."""
        return {name: rows for name, rows in self.events.parts().items() if name != GAPS}

    def gaps(self) -> list[Gap]:
        """What was missing in the journals, by journal and position; read without Spark."""
        rows = self.events.rows(pc.field("journal") == GAPS)
        rows.sort(key=lambda row: row["pos"])
        return [msgspec.json.decode(row["data"], type=Gap) for row in rows]

    def urls(self) -> dict[str, str]:
        """The store behind each journal, without those whose URL had a password."""
        kept = self.events.properties()
        found = {
            name: kept.get(url_property(name.partition(".")[0]), "") for name in self.journals()
        }
        return {name: url for name, url in found.items() if url and ":***@" not in url}


def url_property(journal: str) -> str:
    """The property of the events that holds the URL of a journal, without password."""
    return f"tenure.url.{journal}"


def forgotten_property(journal: str) -> str:
    """The property of the events that says that jobs of a journal were erased."""
    return f"tenure.forgotten.{journal}"


def _bucket(address: str) -> tuple[str, dict[str, str]]:
    """The address for delta-rs, and what it must know of the server."""
    parts = urlsplit(address)
    if parts.scheme not in _SCHEMES:
        raise UsageError(f"{parts.scheme}:// is no place for a lake here; a folder or s3:// is")
    asked = dict(parse_qsl(parts.query))
    storage = {"AWS_REGION": asked.get("region", "us-east-1")}
    if "endpoint_override" in asked:
        scheme = asked.get("scheme", "https")
        storage["AWS_ENDPOINT_URL"] = f"{scheme}://{asked['endpoint_override']}"
        storage["AWS_ALLOW_HTTP"] = str(scheme == "http").lower()
    if parts.username and parts.password:
        storage["AWS_ACCESS_KEY_ID"] = unquote(parts.username)
        storage["AWS_SECRET_ACCESS_KEY"] = unquote(parts.password)
    return f"s3://{parts.hostname}{parts.path.rstrip('/')}", storage


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
        self.options = {"uri": uri, "storage": msgspec.json.encode(storage).decode()}
        self._is_disk = "://" not in uri

    def opened(self) -> DeltaTable | None:
        """The newest version; None if the table does not exist."""
        try:
            return open_table(self.options)
        except TableNotFoundError:
            return None

    def create(self, schema: pa.Schema, partition_by: str) -> None:
        """Make the table unless it is there; a column that it lacks is added."""
        storage = msgspec.json.decode(self.options["storage"])
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

    def rows(
        self, condition: pc.Expression | None = None, columns: list[str] | None = None
    ) -> list[dict[str, Any]]:
        """The rows that a condition chooses, or some columns of them, read without Spark."""
        table = self.opened()
        if table is None:
            return []
        files = table.to_pyarrow_dataset(filesystem=file_system(self.options))
        found: list[dict[str, Any]] = files.to_table(columns, filter=condition).to_pylist()
        return found

    def erase(self, conditions: Sequence[str]) -> int:
        """Remove rows for good, with the files that had them; how many there were."""
        table = self.opened()
        if table is None:
            return 0
        deleted = [table.delete(each)["num_deleted_rows"] for each in conditions]
        # Only files that the log says are removed: others may be those of a commit to come.
        table.vacuum(0, dry_run=False, enforce_retention_duration=False)
        return sum(each or 0 for each in deleted)

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
            reader = spark.read.format("delta-rs").options(**self.options)
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
            commit(self.options, [], after={}, upto={}, removed=gone)

    def append_events(self, rows: DataFrame) -> None:
        """Add events, with the rows of type `offset` that say where they begin and end."""
        self._writer(rows, "journal").save()

    def _put(
        self, batches: Iterable[pa.RecordBatch], schema: pa.Schema, options: Mapping[str, str]
    ) -> None:
        writer = DeltaWriter({**self.options, **options}, schema)
        writer.commit([writer.write(iter(batches))])

    def _writer(self, rows: DataFrame, partition_by: str) -> DataFrameWriter:
        writer = rows.write.format("delta-rs").options(**self.options).mode("append")
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


def lake_events(spark: SparkSession, lake: Lake, where: str = "") -> DataFrame:
    """The events of a lake; those of a condition (`between`) if there is one."""
    lake.require()
    rows = lake.events.read(spark, where)
    return filled(rows if where else rows.where(F.col("journal") != GAPS))


def between(after: Mapping[str, int], upto: Mapping[str, int]) -> str:
    """The condition for events of journals after some positions, up to others."""
    return (
        " or ".join(
            f"(journal = '{journal}' and pos > {after.get(journal, 0):d} and pos <= {position:d})"
            for journal, position in upto.items()
        )
        or "journal = ''"
    )


def journal_events(spark: SparkSession, urls: Sequence[str]) -> DataFrame:
    """The events that live journals hold now."""
    return spark.read.format("tenure").option("urls", "\n".join(urls)).load()


def file_events(spark: SparkSession, path: str) -> DataFrame:
    """A history file: Parquet or JSON lines (by its ending), with any of the journal's columns."""
    suffix = Path(path).suffix
    if "://" not in path and not Path(path).exists():
        raise NotFound(f"there is no history {path}")
    if suffix in (".jsonl", ".json", ".ndjson"):
        return spark.read.schema(DDL).json(path)
    if suffix == ".parquet" or Path(path).is_dir():
        return conformed(spark.read.parquet(path))
    raise UsageError(f"{path}: a history is a .parquet file or folder, or .jsonl, one event a line")


def conformed(rows: DataFrame) -> DataFrame:
    """The journal's columns in their types; those that are not there are null."""
    if not {"job_id", "type"} <= set(rows.columns):
        raise UsageError(
            f"a history needs at least the columns job_id and type; this one has {rows.columns}"
        )
    present = set(rows.columns)
    return rows.select(
        *(
            (F.col(name) if name in present else F.lit(None)).cast(kind).alias(name)
            for name, kind in COLUMNS
        )
    )


def filled(rows: DataFrame) -> DataFrame:
    """Without nulls: an empty value for each column that an older version did not write."""
    return rows.select(
        *(
            F.coalesce(F.col(name), F.lit("" if kind == "string" else 0).cast(kind)).alias(name)
            for name, kind in COLUMNS
        )
    )


def day_of(ts_ms: Column) -> Column:
    """The day of a time, as a text."""
    return F.date_format(F.timestamp_millis(ts_ms), "yyyy-MM-dd")


def in_states(state: Column, kind: str) -> Column:
    """Whether a state is `running`, `final` or `initial` by its contract's table."""
    words = [
        f"{machine.contract}/{word}"
        for machine in machines().values()
        for word in getattr(machine, kind)
    ]
    return F.concat(F.col("contract"), F.lit("/"), state).isin(words)


def with_kinds(rows: DataFrame) -> DataFrame:
    """With `from_kind` and `to_kind`: whether a state is waiting, running or final."""
    for kind, state in (("from_kind", "from_state"), ("to_kind", "to_state")):
        running, final = (in_states(F.col(state), each) for each in ("running", "final"))
        word = F.when(running, "running").when(final, "final").otherwise("waiting")
        rows = rows.withColumn(kind, word)
    return rows


__all__ = [
    "NAMES",
    "between",
    "conformed",
    "day_of",
    "file_events",
    "filled",
    "in_states",
    "journal_events",
    "lake_events",
    "with_kinds",
]
