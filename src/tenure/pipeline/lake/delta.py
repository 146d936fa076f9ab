"""An optional Delta log beside the files of events, which makes them a Delta table.

The log is derived from the files of the lake. So it needs no jar and costs one small file for every
change. A capture that was killed before it wrote the log writes it at its next start. Readers see
every event once, also during a compaction.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import pyarrow as pa

from tenure.core.errors import UsageError
from tenure.pipeline.lake.files import LakeFiles
from tenure.pipeline.lake.layout import EVENTS, event_files
from tenure.pipeline.lake.progress import committed
from tenure.pipeline.schema import ARROW

if TYPE_CHECKING:
    from deltalake import DeltaTable

FORMATS = ("parquet", "delta")
_LABEL = "lake.json"
_DAY = "day"


def keep_log(lake: LakeFiles, wanted: str = "") -> bool:
    """Whether this lake has a Delta log; `wanted` names the format from now on."""
    if wanted and wanted not in FORMATS:
        raise UsageError(f"there is no format {wanted!r}; there are {' and '.join(FORMATS)}")
    label = lake.read_json(_LABEL) or {}
    if wanted and label.get("format", "parquet") != wanted:
        if wanted == "parquet":
            raise UsageError(f"{lake.lake} has a Delta log; remove events/_delta_log and its label")
        _library(lake)
        lake.write_json(_LABEL, label | {"format": wanted})
    return (wanted or label.get("format")) == "delta"


def publish(lake: LakeFiles) -> bool:
    """Bring the log up to date with the files; False if it was."""
    deltalake = _library(lake)
    where = lake.uri(EVENTS)
    if not deltalake.DeltaTable.is_deltatable(where):
        schema = pa.schema([*ARROW, pa.field(_DAY, pa.string())])
        deltalake.DeltaTable.create(where, schema, partition_by=[_DAY], name="events")
    table = deltalake.DeltaTable(where)
    actions = _actions(lake, table)
    if actions:
        table.create_write_transaction(actions, "append", table.schema(), partition_by=[_DAY])
    return bool(actions)


def _actions(lake: LakeFiles, table: DeltaTable) -> list[Any]:
    from deltalake.transaction import AddAction, RemoveAction

    upto = committed(lake)
    there = {
        f"{_DAY}={file.day}/{file.name}": file
        for file in event_files(lake)
        if file.upto <= upto.get(file.journal, 0)
    }
    listed = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    known = {row["path"]: (row["size_bytes"], row[f"partition.{_DAY}"]) for row in listed}
    now_ms = time.time_ns() // 1_000_000
    added = [
        AddAction(
            path=path,
            size=lake.size(file.path),
            partition_values={_DAY: file.day},
            modification_time=now_ms,
            data_change=True,
            stats=msgspec.json.encode({"numRecords": lake.rows(file.path)}).decode(),
        )
        for path, file in there.items()
        if path not in known
    ]
    gone = [
        RemoveAction(
            path=path,
            data_change=True,
            deletion_timestamp=now_ms,
            size=size,
            partition_values={_DAY: day},
        )
        for path, (size, day) in known.items()
        if path not in there
    ]
    return [*added, *gone]


def _library(lake: LakeFiles) -> Any:
    if not lake.is_disk:
        raise UsageError(f"{lake.lake}: a Delta log is kept for lakes on a disk alone")
    try:
        import deltalake
    except ImportError:
        raise UsageError(
            "a Delta log needs the package deltalake; pip install 'tenure[delta]'"
        ) from None
    return deltalake
