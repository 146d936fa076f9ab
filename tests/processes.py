"""What tests ask of processes that are not their own children."""

from __future__ import annotations

from pathlib import Path


def runs(pid: int) -> bool:
    """Whether it is there and no zombie: an orphan's remains belong to the first process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone before the file was opened, or between opening and reading it
        return False
