"""Where a lake is: a folder or a bucket with one Delta table in each of its folders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from tenure.core.errors import NotFound, UsageError
from tenure.pipeline.lake.delta_rs import file_system
from tenure.pipeline.lake.table import Table
from tenure.pipeline.schema import ARROW, GAPS
from tenure.pipeline.source.offsets import Gap
from tenure.store.files import private_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

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
        files = file_system(
            {"path": self._root, "storage": msgspec.json.encode(self._storage).decode()}
        )
        if files.get_file_info(_OLD_LABEL).is_file:
            raise UsageError(
                f"{self.name} is a lake of an older version, of plain Parquet files; capture into "
                f"a new folder, and audit this one with `tenure pipeline audit {self.name}/events`"
            )

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
        rows = self.events.rows([("journal", "=", GAPS)])
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
