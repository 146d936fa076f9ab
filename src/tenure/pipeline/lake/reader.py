"""The name under which stores know a lake, so that they do not trim what it has not kept yet.

The name is made once and stored in the lake. So a lake that is moved, or written from another
machine, stays the same reader.
"""

from __future__ import annotations

import uuid

from tenure.pipeline.lake.files import LakeFiles

_NAME = "_capture/reader.json"


def known_reader(lake: LakeFiles) -> str:
    """The lake's name; "" if nothing was ever captured into it."""
    kept = lake.read_json(_NAME)
    return str(kept["name"]) if kept else ""


def reader_of(lake: LakeFiles) -> str:
    """The lake's name, given now if it has none."""
    name = known_reader(lake)
    if not name:
        folder = lake.lake.partition("?")[0].rstrip("/").rpartition("/")[2]
        name = f"{folder}-{uuid.uuid4().hex[:8]}"
        lake.write_json(_NAME, {"name": name})
    return name
