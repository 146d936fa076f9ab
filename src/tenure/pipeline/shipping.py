"""Sends this package to executors that do not have it, as one archive.

Its dependencies (pyarrow, msgspec, hiredis) must be installed there, or be sent with Spark's own
`--archives`.
"""

from __future__ import annotations

import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PACKAGES = ("tenure", "pyspark_tenure")
_SUFFIXES = {".py", ".lua", ".sql"}


def ship_package(spark: SparkSession) -> Path:
    """Make the archive and give it to the session."""
    path = Path(tempfile.mkdtemp(prefix="tenure-ship-")) / "tenure.zip"
    make_archive(path)
    spark.addArtifacts(str(path), pyfile=True)
    return path


def make_archive(path: Path) -> None:
    """The package's own files, as Python imports them from an archive."""
    import tenure

    top = Path(tenure.__file__).parent.parent
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for package in _PACKAGES:
            for file in sorted((top / package).rglob("*")):
                if file.suffix in _SUFFIXES:
                    archive.write(file, file.relative_to(top))
