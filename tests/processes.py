"""What tests ask of other processes, and do to them."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether it is there and no zombie: an orphan's remains belong to the first process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:  # gone before the file was opened, or between opening and reading it
        return False


def stop(child: int) -> None:
    """SIGSTOP to a child by its process id; all its threads stand still when this returns."""
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
