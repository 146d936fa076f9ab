"""Installs the pinned packages of a folder once, for all test processes of a run and later ones.

python -m tests.interop.npm tests/interop/sse     # before a test asks for them
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from pathlib import Path

from tenure.store.embedded import locate_node

# The pinned packages alone, without native extras. Not `ci`, which wants every platform's extras in
# the lock file.
WORDS = ("install", "--no-save", "--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund")


def installed(folder: Path) -> Path:
    """npm unless node_modules was made from this lock file; returns the program `node`."""
    node = locate_node()
    stamp = folder / "node_modules" / ".installed"
    lock = folder / "package-lock.json"
    with (folder / "package.json").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.read_text() != lock.read_text():
            command = [*npm(node), *WORDS]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"npm failed:\n{done.stdout}{done.stderr}"
            stamp.write_text(lock.read_text())
    return node


def npm(node: Path) -> list[str]:
    """The command for npm: its own, or the script that came with this node."""
    on_path = shutil.which("npm")
    if on_path:
        return [on_path]
    script = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    assert script.exists(), f"there is no npm on PATH and none beside {node}"
    return [str(node), str(script)]


if __name__ == "__main__":
    for name in sys.argv[1:]:
        installed(Path(name))
