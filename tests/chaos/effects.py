"""What handlers really did: a line per start and end, appended to a file of their own process.

A line is one `write` to a file opened for appending, so it outlives a kill -9 of its writer and is
never mixed with another's.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from tenure.core.lease import Lease

Kind = Literal["start", "end", "fail"]
FOLDER_VARIABLE = "CHAOS_LOGS"


class Effect(msgspec.Struct, frozen=True):
    """A handler began its work under this fence, ended it, or failed."""

    e: Kind
    job_id: str
    fence: int
    attempt: int
    worker_id: str
    ms: int


def note_effect(kind: Kind, lease: Lease) -> None:
    """Append a line to this process's file."""
    worker = os.environ.get("POD_NAME", "")
    effect = Effect(kind, lease.job_id, lease.fence, lease.attempt, worker, now_ms())
    append("effects", effect)


def append(log: str, row: msgspec.Struct) -> None:
    """Add a row to this process's file of that log."""
    os.write(_file(log, os.getpid()), msgspec.json.encode(row) + b"\n")


@functools.cache
def _file(log: str, pid: int) -> int:
    path = Path(os.environ[FOLDER_VARIABLE]) / f"{log}-{pid}.jsonl"
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)


def now_ms() -> int:
    """The machine's clock, which is the store's too: everything runs on one machine."""
    return time.time_ns() // 1_000_000


class Effects:
    """Reads the files of all processes as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self.starts: list[Effect] = []
        self.ends: list[Effect] = []
        self.fails: list[Effect] = []
        self.finished: set[str] = set()
        self._decode = msgspec.json.Decoder(Effect).decode

    def refresh(self) -> int:
        """Take in what is new; returns how many jobs some handler has finished."""
        for path in self._folder.glob("effects-*.jsonl"):
            for line in self._new_lines(path):
                effect = self._decode(line)
                if effect.e == "start":
                    self.starts.append(effect)
                elif effect.e == "fail":
                    self.fails.append(effect)
                else:
                    self.ends.append(effect)
                    self.finished.add(effect.job_id)
        return len(self.finished)

    def _new_lines(self, path: Path) -> Iterable[bytes]:
        offset = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._read[path] = offset + whole
        return data[:whole].splitlines()

    def open_of(self, worker: str) -> set[tuple[str, int]]:
        """Job and fence of what this worker has started and is not through with."""
        started, *over = (
            {(row.job_id, row.fence) for row in rows if row.worker_id == worker}
            for rows in (self.starts, self.ends, self.fails)
        )
        return started.difference(*over)
