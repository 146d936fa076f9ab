"""The files that pages load, all from here: style, script, htmx and uPlot as they were published.

An asset's address holds the hash of its content, so a browser may keep it for ever.
"""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

import msgspec

_MEDIA = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
          "svg": "image/svg+xml"}  # fmt: skip
NAMES = ("app.css", "uplot.css", "htmx.js", "uplot.js", "app.js", "icon.svg")


class Asset(msgspec.Struct, frozen=True):
    """One file; `path` is where it is served."""

    name: str
    path: str
    media: str
    content: bytes


@cache
def assets() -> dict[str, Asset]:
    """All files by name."""
    folder = files("tenure.dashboard") / "static"
    return {name: _asset(name, (folder / name).read_bytes()) for name in NAMES}


def _asset(name: str, content: bytes) -> Asset:
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Asset(name, f"/static/{digest}/{name}", _MEDIA[name.rpartition(".")[2]], content)
