"""Becomes ffmpeg in a cage. Started as a fresh interpreter, with a JSON object and the command.

It gives up the network (an empty network namespace), root's rights, new rights through set-uid
programs, and what the limits forbid; then it becomes the program, opened before the rights went,
in the current folder. It dies with its parent. Asked only to look (`{"probe": true}`), it says what
the kernel would permit. It imports nothing of Leasehold, and nothing that takes long to load.
"""

import ctypes
import json
import os
import resource
import signal
import sys

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000
_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_NOBODY = 65_534
_FAILED = 125  # as `env` and `timeout` say it: the wrapper failed, not the program

_libc = ctypes.CDLL(None, use_errno=True)


def cut_network() -> str:
    """Leave the network; why not, or an empty text. Without root a user namespace is needed."""
    flags = _CLONE_NEWNET if os.geteuid() == 0 else _CLONE_NEWNET | _CLONE_NEWUSER
    if _libc.unshare(flags) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def limit(limits: dict[str, int]) -> None:
    """Soft and hard, by the names that `resource` has for them."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))


def restore_signals() -> None:
    """Python ignores these two, and a program would inherit that: over a limit it shall end."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def drop_rights() -> None:
    """Root becomes nobody; and nothing that is executed from here on can gain rights."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def main(asked: dict[str, object], argv: list[str]) -> None:
    """Do as asked and become the program; never returns when it did."""
    if asked.get("probe"):
        sys.stdout.write(cut_network())
        return
    parent = os.getppid()
    program = os.open(argv[0], os.O_RDONLY)
    os.set_inheritable(program, True)  # the interpreter of a script has to open it again
    if asked["network"] == "none":
        problem = cut_network()
        if problem:
            sys.stderr.write(f"confine: the network cannot be taken away: {problem}\n")
            sys.exit(_FAILED)
    limit(dict(asked["limits"]))  # type: ignore[call-overload]
    restore_signals()
    drop_rights()
    if os.getppid() != parent:
        sys.exit(_FAILED)  # it died before the kernel was told to watch it
    os.execve(program, argv, {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"})  # nosec B606 # no shell is the point


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2:])
