"""Execs a command the kernel kills when its parent dies. Run as a program, never imported.

    python -I -S launch.py <parent pid> <signal> <uid or -> <gid or -> -- program arguments...

It asks the kernel to send `signal` when the parent dies, then executes `program` under its own
process id. This runs after exec and not between fork and exec, where a process
with threads must not run Python. The user is changed first, because that clears the request.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, number, uid, gid, _, *command = sys.argv[1:]
    if uid != "-":
        os.setgroups([])
        os.setgid(int(gid))
        os.setuid(int(uid))
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
            sys.exit(f"cannot ask to die with the parent: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != int(parent):
        sys.exit("the parent died before its child started")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and exec would pass that on
    os.execv(command[0], command)  # nosec B606 # no shell is the point


if __name__ == "__main__":
    main()
