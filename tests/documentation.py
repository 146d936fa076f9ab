"""The documentation as `bin/docs` builds it, built once for all test processes of a run."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD_S = 400  # ten seconds of work, and longer on a machine that is busy
COMMAND = (sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict")


def built_site(factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site. The build must print nothing: a warning is an error."""
    base = factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    folder, stamp = shared / "site", shared / "site.built"
    with (shared / "site.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists():
            done = subprocess.run(
                [*COMMAND, "--site-dir", str(folder)],
                cwd=ROOT,
                env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
                capture_output=True,
                text=True,
                timeout=BUILD_S,
            )
            assert (done.returncode, done.stdout + done.stderr) == (0, "")
            stamp.touch()
    return folder
