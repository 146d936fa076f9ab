"""What a running `tenure up` tells the other commands: `up.json` in its data folder."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from tenure.store.files import write_private

FILE_NAME = "up.json"


class RunningUp(msgspec.Struct, frozen=True, kw_only=True):
    """Where the parts of a running `tenure up` are, and the process that owns them.

    `queue_url` is the first of the `queues` that its worker serves.
    """

    pid: int
    gateway_url: str
    queue_url: str
    redis_url: str
    started_ms: int
    queues: list[str] = []


def running_up(folder: Path) -> RunningUp | None:
    """The `tenure up` that owns this data folder now, if its process is alive.

    A file that another user made is not believed: it would lead our jobs to a store of theirs.
    """
    try:
        with (folder / FILE_NAME).open("rb") as file:
            ours = os.fstat(file.fileno()).st_uid == os.geteuid()
            up = msgspec.json.decode(file.read(), type=RunningUp)
    except (OSError, msgspec.MsgspecError):
        return None
    return up if ours and _alive(up.pid) else None


def announce_up(folder: Path, up: RunningUp) -> None:
    """Write the file whole or not at all; it holds a password, so it is for its owner only."""
    text = msgspec.json.format(msgspec.json.encode(up), indent=2).decode()
    write_private(folder / FILE_NAME, text + "\n")


def withdraw_up(folder: Path) -> None:
    """Say that it runs no more."""
    (folder / FILE_NAME).unlink(missing_ok=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
