"""An S3 server that checks signatures: `rclone serve s3` on loopback, from its wheel."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.ports import free_port

READY_WITHIN_S = 30.0


class S3Server:
    """Serves a folder whose subfolders are buckets; `keys` are the pairs it accepts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self, *keys: tuple[str, str]) -> None:
        program = shutil.which("rclone", path=str(Path(sys.executable).parent)) or "rclone"
        auth = [word for pair in keys for word in ("--auth-key", ",".join(pair))]
        where = ["--addr", f"127.0.0.1:{self.port}", str(self.folder)]
        self._process = subprocess.Popen(
            [program, "serve", "s3", *auth, *where],
            env=os.environ | {"RCLONE_CONFIG": str(self.folder.parent / "none.conf")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + READY_WITHIN_S
        while not self._answers():
            assert self._process.poll() is None, "rclone ended"
            assert time.monotonic() < deadline, "rclone does not answer"
            time.sleep(0.02)  # looks again until the deadline

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def objects(self, bucket: str) -> dict[str, int]:
        """What lies in a bucket; without what a server that was killed left half-written."""
        top = self.folder / bucket
        return {
            str(path.relative_to(top)): path.stat().st_size
            for path in sorted(top.rglob("*"))
            if path.is_file() and not path.name.startswith(".rclone_temp")
        }

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0
