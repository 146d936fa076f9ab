"""Files of the lake, on a disk or in a bucket (`s3://...`), written atomically.

A file appears under its name only when it is complete: on a disk by renaming, in a bucket because
an object appears with its last byte.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from tenure.core.errors import NotFound, UsageError
from tenure.pipeline.schema import SCHEMA_VERSION
from tenure.store.files import private_folder

# Parallel readers divide a file by its row groups.
ROWS_IN_GROUP = 131_072
_HIDDEN = "_writing-"
_LABEL = "lake.json"


class LakeFiles:
    """A folder tree by relative paths with slashes. Opened in every process that needs it."""

    def __init__(self, lake: str) -> None:
        self._given = lake
        # For people: without a password.
        self.lake = re.sub(r"(://[^/?]*?):[^/?]*@", r"\1:***@", lake)
        if "://" in lake:
            self._system, root = _remote(lake)
            self.is_disk = isinstance(self._system, fs.LocalFileSystem)
        else:
            self._system, root, self.is_disk = (
                fs.LocalFileSystem(),
                str(Path(lake).absolute()),
                True,
            )
        self._root = root.rstrip("/")

    @property
    def address(self) -> str:
        """The lake for another process, which may run in another folder."""
        return self._root if self.is_disk else self._given

    def uri(self, path: str) -> str:
        """Where Spark finds it."""
        if self.is_disk:
            return f"file://{self._root}/{path}"
        scheme = self.lake.partition("://")[0].replace("s3", "s3a", 1)
        return f"{scheme}://{self._root}/{path}"

    def begin(self) -> None:
        """Make it a lake; refuses a folder with other files, and a lake of a newer version."""
        known = self.read_json(_LABEL)
        if known is None:
            if self.names("") and not self.names("events"):
                raise UsageError(
                    f"{self.lake} holds other files; a lake needs an empty or new folder"
                )
            self._keep_private()
            self.write_json(_LABEL, {"tenure": "lake", "schema": SCHEMA_VERSION})
        elif int(known.get("schema", 0)) > SCHEMA_VERSION:
            raise UsageError(
                f"{self.lake} was written by a newer Tenure (schema {known['schema']}, this one "
                f"knows {SCHEMA_VERSION}); update this one"
            )
        else:
            self._keep_private()

    def _keep_private(self) -> None:
        if self.is_disk:
            private_folder(Path(self._root), mark="*")

    def require(self) -> None:
        """Refuse what is no lake."""
        if self.read_json(_LABEL) is None:
            raise NotFound(
                f"{self.lake} is no lake; "
                f"`tenure pipeline capture --lake {self.lake} --queue URL` makes one"
            )

    def names(self, folder: str) -> list[str]:
        """What a folder holds, by name, sorted; [] if there is no such folder."""
        where = f"{self._root}/{folder}" if folder else self._root
        selector = fs.FileSelector(where, allow_not_found=True)
        found = (info.base_name for info in self._system.get_file_info(selector))
        return sorted(name for name in found if not name.startswith(_HIDDEN))

    def size(self, path: str) -> int:
        """Bytes of a file; 0 if there is none."""
        return int(self._system.get_file_info(f"{self._root}/{path}").size or 0)

    def rows(self, path: str) -> int:
        """How many rows a Parquet file has."""
        return int(pq.read_metadata(f"{self._root}/{path}", filesystem=self._system).num_rows)

    def read_json(self, path: str) -> Any:
        """The value in a file, None if there is none."""
        try:
            with self._system.open_input_stream(f"{self._root}/{path}") as stream:
                return msgspec.json.decode(stream.read())
        except FileNotFoundError:
            return None

    def write_json(self, path: str, value: Any) -> None:
        """Replace a file as a whole."""
        with self._whole(path) as draft, self._system.open_output_stream(draft) as stream:
            stream.write(msgspec.json.encode(value))

    def write_table(self, path: str, table: pa.Table) -> None:
        """Replace a Parquet file as a whole."""
        with self._whole(path) as draft:
            pq.write_table(
                table,
                draft,
                row_group_size=ROWS_IN_GROUP,
                filesystem=self._system,
                compression="zstd",
            )

    @contextmanager
    def writer(self, path: str, schema: pa.Schema) -> Iterator[pq.ParquetWriter]:
        """A Parquet file that appears when the block ends well."""
        with (
            self._whole(path) as draft,
            pq.ParquetWriter(
                draft, schema, filesystem=self._system, compression="zstd", compression_level=1
            ) as writer,
        ):
            yield writer

    def read_table(self, paths: list[str], schema: pa.Schema) -> pa.Table:
        """Parquet files as one table with these columns; a missing one is null."""
        tables = []
        for path in paths:
            table = pq.read_table(f"{self._root}/{path}", filesystem=self._system)
            columns = [
                table.column(field.name).cast(field.type)
                if field.name in table.column_names
                else pa.nulls(table.num_rows, field.type)
                for field in schema
            ]
            tables.append(pa.Table.from_arrays(columns, schema=schema))
        return pa.concat_tables(tables) if tables else schema.empty_table()

    def pages(
        self, path: str, columns: Sequence[str], *, few: Sequence[str], rows: int, nth: int, of: int
    ) -> Iterator[pa.RecordBatch]:
        """Some columns of slice `nth` of `of` of a Parquet file, `rows` at a time.

        Columns in `few` are dictionary-encoded. A column that is missing in the file is left out.
        """
        with self._system.open_input_file(f"{self._root}/{path}") as source:
            file = pq.ParquetFile(source, read_dictionary=list(few))
            groups = file.num_row_groups
            mine = list(range(groups * nth // of, groups * (nth + 1) // of))
            there = [name for name in columns if name in file.schema_arrow.names]
            yield from file.iter_batches(
                batch_size=rows, row_groups=mine, columns=there, use_threads=False
            )

    def remove(self, path: str) -> None:
        """Delete a file, or a folder with all in it; one that is not there is no error."""
        full = f"{self._root}/{path}"
        info = self._system.get_file_info(full)
        if info.type == fs.FileType.Directory:
            self._system.delete_dir(full)
        elif info.type == fs.FileType.File:
            self._system.delete_file(full)

    def move(self, path: str, to: str) -> None:
        """Rename a file or folder; whatever had the new name is replaced."""
        self.remove(to)
        self._parent(f"{self._root}/{to}")
        self._system.move(f"{self._root}/{path}", f"{self._root}/{to}")

    @contextmanager
    def _whole(self, path: str) -> Iterator[str]:
        full = f"{self._root}/{path}"
        if not self.is_disk:
            yield full
            return
        folder, _, name = full.rpartition("/")
        self._parent(full)
        draft = f"{folder}/{_HIDDEN}{uuid.uuid4().hex[:12]}-{name}"
        try:
            yield draft
            Path(draft).replace(full)
        finally:
            Path(draft).unlink(missing_ok=True)

    def _parent(self, full: str) -> None:
        self._system.create_dir(full.rpartition("/")[0], recursive=True)


def _remote(lake: str) -> tuple[fs.FileSystem, str]:
    if "endpoint_override=" in lake:
        # Servers that speak S3 and are not Amazon's mostly refuse the checksums of newer clients.
        os.environ.setdefault("AWS_REQUEST_CHECKSUM_CALCULATION", "when_required")
        os.environ.setdefault("AWS_RESPONSE_CHECKSUM_VALIDATION", "when_required")
    try:
        system, root = fs.FileSystem.from_uri(lake)
    except (pa.ArrowInvalid, OSError) as error:
        scheme = lake.partition("://")[0]
        raise UsageError(f"{scheme}:// is no place for a lake here: {error}") from None
    return system, root


def gathered(batches: Iterable[pa.RecordBatch], rows_least: int) -> Iterator[pa.RecordBatch]:
    """Small batches joined to ones of at least `rows_least` rows, one in memory at a time."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        waiting.append(batch)
        rows += batch.num_rows
        if rows >= rows_least:
            yield pa.concat_batches(waiting)
            waiting, rows = [], 0
    if waiting:
        yield pa.concat_batches(waiting)
