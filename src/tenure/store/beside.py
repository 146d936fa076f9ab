"""Files that lie beside the code of a package: scripts and statements."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tenure.core.errors import UsageError

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable


def folder_beside(package: str, *names: str) -> Traversable:
    """A folder in a package; in an archive by importlib.resources, which is slow to import."""
    spec = find_spec(package)
    places = list(spec.submodule_search_locations or ()) if spec else []
    folder: Traversable | None = Path(places[0], *names) if places else None
    if folder is not None and not folder.is_dir():
        from importlib.resources import files

        folder = files(package).joinpath(*names)
    if folder is None or not folder.is_dir():
        raise UsageError(f"package {package} has no folder {'/'.join(names)}/ to load from")
    return folder
