"""What a killed worker left of a customer's source is gone when the next worker starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.vault import new_kek
from tests.unit.transcode.test_workspace import start_child


@pytest.mark.clause("I-55")
def test_an_idle_worker_removes_the_folders_of_killed_workers_at_its_start(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    dead, dead_folder = start_child(work)
    alive, alive_folder = start_child(work)
    dead.send_signal(signal.SIGKILL)
    dead.wait()
    assert (dead_folder / "input").exists()
    command = [sys.executable, "-m", "tenure.cli", "worker", "tenure.transcode", "--burst"]
    environment = {
        "TENURE_VAULT_KEYS": new_kek("k1"),
        "TENURE_TRANSCODE_FOLDER": str(work),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    try:
        done = subprocess.run(
            [*command, "--queue", f"inbox+sqlite:///{tmp_path}/jobs.db"],
            env=os.environ | environment,
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert not dead_folder.parent.exists()
        assert (alive_folder / "input").exists()
    finally:
        alive.kill()
        alive.wait()
        for child in (dead, alive):
            assert child.stdout is not None
            child.stdout.close()
