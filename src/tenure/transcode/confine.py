"""Becomes ffmpeg in a cage. Started as a fresh interpreter, with a JSON object and the command.

It gives up the network (an empty network namespace), the files outside the current folder, root's
rights, new rights through set-uid programs, the system calls that a codec never needs, and what the
limits forbid; then it becomes the program, opened before the rights went. It dies with its parent.
What it is asked for and the kernel refuses ends it with status 125 and the reason. It imports
nothing of Tenure, and nothing that takes long to load.

`files` is how other files are kept away. "landlock" asks the kernel to refuse them. "namespace"
builds a root folder that holds the readable ones, read-only, and the current folder as /attempt.
"bubblewrap" has the program of that name build it, where it may do what we may not.
"""

import contextlib
import ctypes
import errno
import json
import os
import resource
import signal
import stat
import struct
import sys

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_THREAD = 0x10000000, 0x40000000, 0x10000
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REMOUNT = 1, 2, 4, 8, 32
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 4096, 16384, 1 << 18, 2
_NOBODY = 65_534
_PID_IN_BUBBLEWRAP = 2  # it makes a namespace of processes, and is the first in it
_FAILED = 125  # as `env` and `timeout` say it: the wrapper failed, not the program
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
_ROOT, _WORK = "/tmp", "/attempt"  # nosec B108 # covered by a mount that the cage alone sees

# By machine: the number of the audit architecture, and of calls that are looked at more closely.
_LOOKED_AT = (
    *("architecture", "clone", "pivot_root", "prlimit64"),
    *("tgkill", "sched_setaffinity", "prctl", "fcntl", "openat"),
)
_MACHINES = {
    "x86_64": (0xC000003E, 56, 155, 302, 234, 203, 157, 72, 257),
    "aarch64": (0xC00000B7, 220, 41, 261, 131, 122, 167, 25, 56),
}
_OPEN_X86_64 = 2  # aarch64 has openat alone
_CLONE3, _OPENAT2 = 435, 437
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_TMPFILE = 0o20000000  # a file without a name
_IOCTL_ONLY = 3  # an access mode that Landlock takes for neither reading nor writing
# What is refused, one line for each kind, in the same order: sockets and new processes; other
# processes (signals, memory, priorities); mounts, namespaces and foreign roots; modes, owners,
# links, devices and attributes; sizes and times of files by name and watching them, which Landlock
# permits everywhere (sizes: in its first versions); folders, removing and renaming, and shared
# memory and queues, which would all hide bytes from the limits; keys, modules, clocks, BPF and
# other ways into the kernel (two lines). First the calls that have the same numbers everywhere.
_DENIED_EVERYWHERE = (
    *(424, 434, 438, 440, 448),
    *(428, 429, 430, 431, 432, 433, 442, 467),
    *(452, 463, 466, 469),
    *(447,),
    *(425, 426, 427),
)
_DENIED = {
    "x86_64": (
        *(41, 53, 57, 58),
        *(62, 101, 129, 141, 142, 144, 200, 251, 256, 274, 279, 297, 310, 311, 312, 314),
        *(155, 161, 165, 166, 167, 168, 272, 303, 304, 308),
        *(86, 88, 90, 91, 92, 93, 94, 133, 188, 189, 190, 197, 198, 199, 259, 260, 265, 266, 268),
        *(76, 132, 235, 253, 254, 261, 280, 294, 300, 301),
        *(82, 83, 84, 87, 258, 263, 264, 316),
        *(29, 30, 31, 64, 65, 66, 68, 69, 70, 71, 220, 240, 241, 319),
        *(103, 135, 154, 159, 163, 164, 169, 170, 171, 172, 173, 175, 176, 179, 227),
        *(246, 248, 249, 250, 298, 313, 320, 321, 323),
    ),
    "aarch64": (
        *(198, 199),
        *(129, 117, 138, 140, 118, 119, 130, 30, 238, 100, 239, 240, 270, 271, 272, 274),
        *(39, 40, 41, 51, 97, 224, 225, 264, 265, 268),
        *(5, 6, 7, 14, 15, 16, 33, 36, 37, 52, 53, 54, 55),
        *(26, 27, 45, 88, 262, 263),
        *(34, 35, 38, 276),
        *(194, 196, 195, 190, 193, 191, 186, 189, 188, 187, 192, 180, 181, 279),
        *(60, 89, 92, 104, 105, 106, 112, 116, 142, 161, 162, 170, 171),
        *(217, 218, 219, 241, 273, 280, 282, 294),
    ),
}

_libc = ctypes.CDLL(None, use_errno=True)


class Refused(Exception):
    """The kernel does not give what was asked for."""


def _check(answer: int, what: str) -> int:
    if answer < 0:
        raise Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return answer


def _calls() -> dict[str, int]:
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise Refused(f"the numbers of system calls on {machine} are unknown")
    return dict(zip(_LOOKED_AT, _MACHINES[machine], strict=True))


def leave(network: bool, files: bool) -> None:
    """Into namespaces of our own. Without root a user namespace is needed for that."""
    flags = _CLONE_NEWNET * network | (_CLONE_NEWNS | _CLONE_NEWUTS) * files
    flags |= _CLONE_NEWIPC * (network or files)
    uid, gid = os.geteuid(), os.getegid()
    if flags and uid != 0:
        flags |= _CLONE_NEWUSER
    if flags:
        _check(_libc.unshare(flags), "no namespaces")
    if flags & _CLONE_NEWUSER:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{uid} {uid} 1"),
            ("gid_map", f"{gid} {gid} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def _mount(source: str, target: str, kind: str = "", flags: int = 0, data: str = "") -> None:
    words = (source.encode(), target.encode(), kind.encode() or None)
    answer = _libc.mount(*words, ctypes.c_ulong(flags), data.encode() or None)
    _check(answer, f"no mount at {target.removeprefix(_ROOT) or '/'}")


def _bind(fd: int, target: str, flags: int) -> None:
    """Show an open file or folder at another place; what its own mount forbids stays forbidden."""
    _mount(f"/proc/self/fd/{fd}", target, flags=_MS_BIND | _MS_REC)
    kept = os.fstatvfs(fd).f_flag & (_MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("", target, flags=_MS_REMOUNT | _MS_BIND | kept | flags)


def build_root(readable: list[str]) -> None:
    """A root that holds what may be read, and the current folder as the only one to write to."""
    opened = {path: os.open(path, os.O_PATH) for path in readable if not os.path.islink(path)}
    links = {path: os.readlink(path) for path in readable if os.path.islink(path)}
    here = os.open(".", os.O_PATH)
    os.umask(0o022)
    _mount("", "/", flags=_MS_REC | _MS_PRIVATE)
    _mount("tmpfs", _ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "size=1m,mode=755")
    for path, fd in opened.items():
        target = _ROOT + path
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o600))
        device = stat.S_ISCHR(os.fstat(fd).st_mode)
        _bind(fd, target, _MS_NOSUID if device else _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    for path, to in links.items():
        os.makedirs(os.path.dirname(_ROOT + path), exist_ok=True)
        os.symlink(to, _ROOT + path)
    os.mkdir(_ROOT + _WORK)
    _bind(here, _ROOT + _WORK, _MS_NOSUID | _MS_NODEV)
    _mount("", _ROOT, flags=_MS_REMOUNT | _MS_BIND | _MS_RDONLY | _MS_NOSUID | _MS_NODEV)
    os.chdir(_ROOT)
    _check(_libc.syscall(_calls()["pivot_root"], b".", b"."), "no root of our own")
    _check(_libc.umount2(b".", _MNT_DETACH), "the old root stays")
    os.chdir(_WORK)


def landlock(readable: list[str], program: int) -> int:
    """The rules of Landlock: read and execute these, make, read and write files here."""
    version = _check(_libc.syscall(444, None, 0, 1), "no Landlock")
    if version < 3:  # it cannot refuse to truncate the files of the worker
        raise Refused(f"Landlock is of version {version}; 3 is the first that keeps files whole")
    execute, write, read, read_folder, make = (1 << bit for bit in (0, 1, 2, 3, 8))
    truncate = 1 << 14
    # All that this version knows of files, TCP, signals and abstract sockets is refused.
    bits = {3: 15, 4: 15}.get(version, 16)
    words = ((1 << bits) - 1, 3, 3)[: 1 if version < 4 else 2 if version < 6 else 3]
    attributes = struct.pack(f"={len(words)}Q", *words)
    rules = _check(_libc.syscall(444, attributes, len(attributes), 0), "no Landlock rules")
    of_files = execute | write | read | truncate
    allowed = {os.open(path, os.O_PATH): execute | read | read_folder for path in readable}
    allowed |= {program: execute | read}
    allowed |= {os.open(".", os.O_PATH): read | read_folder | write | truncate | make}
    for fd, rights in allowed.items():
        mode = os.fstat(fd).st_mode
        if not stat.S_ISDIR(mode):
            rights = (rights | write * stat.S_ISCHR(mode)) & of_files
        rule = struct.pack("=Qi", rights, fd)
        _check(_libc.syscall(445, rules, 1, rule, 0), "no rule of Landlock")
    return rules


def syscall_filter(own: int) -> bytes:
    """A BPF program that refuses what is listed, and what reaches past the process `own`.

    Threads can be made, processes cannot; signals and limits are for the process itself, by a
    call or by a file's owner; it keeps the signal for its parent's death, and its files a name.
    """
    calls, machine = _calls(), os.uname().machine
    load, equal, least, any_of, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, calls["architecture"]),
        (give, 0, 0, 0x80000000),  # of another architecture: the process ends
        (load, 0, 0, 0),
        (least, 0, 1, 0x40000000),  # x32 has other numbers for the same calls
        (give, 0, 0, refuse),
    ]

    def look(number: int, argument: int, test: int, values: tuple[int, ...], found: int) -> None:
        """Answer `found` where the low half of the argument passes the test, else the contrary.

        An argument that opens a file is further looked at for its access mode.
        """
        body = [(load, 0, 0, 16 + 8 * argument)]
        for value in values:
            body += [(test, 0, 1, value), (give, 0, 0, found)]
        if _TMPFILE in values:
            body += [(mask, 0, 0, 3), (equal, 0, 1, _IOCTL_ONLY), (give, 0, 0, found)]
        body += [(give, 0, 0, refuse if found == allow else allow)]
        steps.extend([(equal, 0, len(body), number), *body])

    look(calls["clone"], 0, any_of, (_CLONE_THREAD,), allow)
    look(calls["tgkill"], 0, equal, (own,), allow)
    look(calls["prlimit64"], 0, equal, (0,), allow)
    look(calls["sched_setaffinity"], 0, equal, (0,), allow)
    look(calls["prctl"], 0, equal, (_PR_SET_PDEATHSIG,), refuse)
    look(calls["fcntl"], 1, equal, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX), refuse)
    look(calls["openat"], 2, any_of, (_TMPFILE,), refuse)
    if machine == "x86_64":
        look(_OPEN_X86_64, 1, any_of, (_TMPFILE,), refuse)
    for number in (_CLONE3, _OPENAT2):  # flags out of sight; the C library then uses the older call
        steps += [(equal, 0, 1, number), (give, 0, 0, unknown)]
    for number in (*_DENIED_EVERYWHERE, *_DENIED[machine]):
        steps += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (give, 0, 0, allow)])


def filter_syscalls(program: bytes) -> None:
    """From here on."""
    held = ctypes.create_string_buffer(program)
    words = struct.pack("@HP", len(program) // 8, ctypes.addressof(held))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, words, 0, 0), "no filter of system calls")


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
    """Root becomes the folder's owner, or nobody; nothing executed later can gain rights."""
    if os.geteuid() == 0:
        uid = os.stat(".").st_uid or _NOBODY
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def bubblewrapped(program: str, bwrap: str, readable: list[str], syscalls: bool) -> list[str]:
    """The command line by which bubblewrap builds the root, without network, and filters calls."""
    words = [bwrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--dev", "/dev"]
    for path in [each for each in readable if not each.startswith("/dev/")]:
        how = ("--symlink", os.readlink(path)) if os.path.islink(path) else ("--ro-bind", path)
        words += [*how, path]
    words += ["--ro-bind", program, program, "--bind", os.getcwd(), _WORK, "--chdir", _WORK]
    words += ["--remount-ro", "/dev", "--remount-ro", "/"]  # both are memory, which no limit counts
    if syscalls:
        fd = os.memfd_create("filter", 0)
        os.write(fd, syscall_filter(_PID_IN_BUBBLEWRAP))
        os.lseek(fd, 0, os.SEEK_SET)
        words += ["--seccomp", str(fd)]
    return [*words, "--"]


def main(asked: dict[str, object], argv: list[str]) -> None:
    """Do as asked and become the program; never returns when it did."""
    parent = os.getppid()
    readable = [path for path in list(asked["readable"]) if os.path.exists(path)]  # type: ignore[call-overload]
    files, network, syscalls = asked["files"], bool(asked["network"]), bool(asked["syscalls"])
    program = os.open(argv[0], os.O_RDONLY)
    os.set_inheritable(program, True)  # the interpreter of a script has to open it again
    if files == "bubblewrap":
        argv = [*bubblewrapped(argv[0], str(asked["bwrap"]), readable, syscalls), *argv]
        program = os.open(argv[0], os.O_PATH)
    else:
        leave(network, files == "namespace")
    rules = landlock(readable, program) if files == "landlock" else -1
    if files == "namespace":
        build_root(readable)
    os.umask(0o077)
    limit(dict(asked["limits"]))  # type: ignore[call-overload]
    restore_signals()
    if files != "bubblewrap":  # it does this itself, and may be a set-uid program
        drop_rights()
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(_FAILED)  # it died before the kernel was told to watch it
    if rules >= 0:
        _check(_libc.syscall(446, rules, 0), "Landlock does not restrict us")
    if syscalls and files != "bubblewrap":
        filter_syscalls(syscall_filter(os.getpid()))
    os.execve(program, argv, _ENVIRONMENT)  # nosec B606 # no shell is the point


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main(json.loads(sys.argv[1]), sys.argv[2:])
        except (Refused, OSError) as error:
            sys.stderr.write(f"confine: {error}\n")
            sys.exit(_FAILED)
