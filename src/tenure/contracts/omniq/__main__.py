"""Writes our scripts into a folder for the official SDKs, which load fifteen files by fixed names.

    python -m tenure.contracts.omniq FOLDER

A client that uses the folder (in Python `OmniqClient(scripts_dir=FOLDER)`) works as before, without
stacked leases, leaked slots and duplicate ids. Its steps are in the journal.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tenure.contracts.omniq.calls import SCRIPTS

_SDK_SCRIPTS = (
    "enqueue", "reserve", "heartbeat", "ack_success", "ack_fail", "promote_delayed", "reap_expired",
    "pause", "resume", "retry_failed", "retry_failed_batch", "remove_job", "remove_jobs_batch",
    "childs_init", "child_ack",
)  # fmt: skip


def write_scripts(folder: Path) -> list[Path]:
    """Write the fifteen files, their includes expanded; creates the folder if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.lua" for name in _SDK_SCRIPTS]
    for path in paths:
        path.write_text(SCRIPTS[path.stem].source, encoding="utf-8")
    return paths


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m tenure.contracts.omniq FOLDER")
    write_scripts(Path(sys.argv[1]))
