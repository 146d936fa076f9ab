"""A child that must not outlive its parent, even one that is killed."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel send SIGTERM when the parent is gone; exit now if it already is."""
    if not parent_pid:
        return
    if sys.platform == "linux":
        import ctypes  # not above: a hardened service (MemoryDenyWriteExecute) may refuse it

        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent_pid:  # it died between our start and the call above
        raise SystemExit(1)
