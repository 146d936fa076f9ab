"""Confines itself, then executes ffmpeg. Run in a new interpreter: a JSON request, the command.

It gives up the network (an empty network namespace), files outside the current folder, root's
rights, new rights through set-uid programs and the system calls that a codec never needs. It sets
the limits and executes the program, which it opened before. It dies with its parent. If the kernel
refuses a part of the request, it exits with status 125 and the reason. To start fast it imports
nothing of Tenure and nothing slow.

`files` is the method that hides other files. "landlock" has the kernel refuse access. "namespace"
builds a root folder with the readable files, read-only, and the current folder as /attempt.
"bubblewrap" has that program build the root folder, where it has rights that we lack.
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
_PID_IN_BUBBLEWRAP = 2  # bubblewrap is process 1 of the namespace that it makes
_FAILED = 125  # as with `env` and `timeout`: the wrapper failed, not the program
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
_ROOT, _WORK = "/tmp", "/attempt"  # nosec B108 # covered by a mount inside the namespace

# Per machine: the number of the audit architecture and of the calls whose arguments are checked.
_CHECKED = (
    *("architecture", "clone", "pivot_root", "prlimit64"),
    *("tgkill", "sched_setaffinity", "prctl", "fcntl", "openat"),
)
_MACHINES = {
    "x86_64": (0xC000003E, 56, 155, 302, 234, 203, 157, 72, 257),
    "aarch64": (0xC00000B7, 220, 41, 261, 131, 122, 167, 25, 56),
}
_OPEN_X86_64 = 2  # aarch64 has only openat
_CLONE3, _OPENAT2 = 435, 437
_F_SETOWN, _F_SETSIG, _F_SETOWN_EX = 8, 10, 15
_TMPFILE = 0o20000000  # a file without a name
_IOCTL_ONLY = 3  # an access mode that Landlock treats as neither reading nor writing
# The refused calls, one line for each kind, in this order: sockets and new processes; other
# processes (signals, memory, priorities); mounts, namespaces and other roots; modes, owners, links,
# devices and attributes; sizes and times of files by name and watching files, which Landlock
# permits everywhere (sizes: in its first versions); folders, removing and renaming; shared memory
# and queues (these two would hide bytes from the limits); keys, modules, clocks, BPF and other
# kernel interfaces (two lines). Calls with the same number on every machine come first.
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


class _Refused(Exception):
    """The kernel refuses a part of the request."""


def _check(answer: int, what: str) -> int:
    if answer < 0:
        raise _Refused(f"{what}: {os.strerror(ctypes.get_errno())}")
    return answer


def _calls() -> dict[str, int]:
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise _Refused(f"the numbers of system calls on {machine} are unknown")
    return dict(zip(_CHECKED, _MACHINES[machine], strict=True))


def _enter_namespaces(network: bool, files: bool) -> None:
    """Enter new namespaces. Without root that needs a user namespace as well."""
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
    where = (source.encode(), target.encode(), kind.encode() or None)
    answer = _libc.mount(*where, ctypes.c_ulong(flags), data.encode() or None)
    _check(answer, f"no mount at {target.removeprefix(_ROOT) or '/'}")


def _bind(fd: int, target: str, flags: int) -> None:
    """Bind an open file or folder to `target`; restrictions of its own mount stay."""
    _mount(f"/proc/self/fd/{fd}", target, flags=_MS_BIND | _MS_REC)
    kept = os.fstatvfs(fd).f_flag & (_MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    _mount("", target, flags=_MS_REMOUNT | _MS_BIND | kept | flags)


def _build_root(readable: list[str]) -> None:
    """Build a root with the readable files, and the current folder as the only writable one."""
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


def _landlock(readable: list[str], program: int) -> int:
    """Landlock rules: read and execute `readable`; make, read and write files here."""
    version = _check(_libc.syscall(444, None, 0, 1), "no Landlock")
    if version < 3:  # it cannot keep the program from truncating files of the worker
        raise _Refused(f"Landlock is of version {version}; 3 is the first that keeps files whole")
    execute, write, read, read_folder, make = (1 << bit for bit in (0, 1, 2, 3, 8))
    truncate = 1 << 14
    # Refuse everything that this version knows of files, TCP, signals and abstract sockets.
    bits = {3: 15, 4: 15}.get(version, 16)
    handled = ((1 << bits) - 1, 3, 3)[: 1 if version < 4 else 2 if version < 6 else 3]
    attributes = struct.pack(f"={len(handled)}Q", *handled)
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


def _syscall_filter(own: int) -> bytes:
    """A BPF program that refuses the listed calls, and calls that affect processes but `own`.

    The program can make threads but no processes. It can send signals to itself and set its own
    limits, not those of others. It cannot drop its parent-death signal or make files without a
    name.
    """
    calls, machine = _calls(), os.uname().machine
    load, equal, least, any_of, mask, give = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, calls["architecture"]),
        (give, 0, 0, 0x80000000),  # another architecture: kill the process
        (load, 0, 0, 0),
        (least, 0, 1, 0x40000000),  # x32 numbers the same calls differently
        (give, 0, 0, refuse),
    ]

    def check_argument(
        number: int, argument: int, test: int, values: tuple[int, ...], found: int
    ) -> None:
        """Return `found` if the low half of the argument passes the test, else the opposite.

        For calls that open a file, the access mode is checked too.
        """
        body = [(load, 0, 0, 16 + 8 * argument)]
        for value in values:
            body += [(test, 0, 1, value), (give, 0, 0, found)]
        if _TMPFILE in values:
            body += [(mask, 0, 0, 3), (equal, 0, 1, _IOCTL_ONLY), (give, 0, 0, found)]
        body += [(give, 0, 0, refuse if found == allow else allow)]
        steps.extend([(equal, 0, len(body), number), *body])

    check_argument(calls["clone"], 0, any_of, (_CLONE_THREAD,), allow)
    check_argument(calls["tgkill"], 0, equal, (own,), allow)
    check_argument(calls["prlimit64"], 0, equal, (0,), allow)
    check_argument(calls["sched_setaffinity"], 0, equal, (0,), allow)
    check_argument(calls["prctl"], 0, equal, (_PR_SET_PDEATHSIG,), refuse)
    check_argument(calls["fcntl"], 1, equal, (_F_SETOWN, _F_SETSIG, _F_SETOWN_EX), refuse)
    check_argument(calls["openat"], 2, any_of, (_TMPFILE,), refuse)
    if machine == "x86_64":
        check_argument(_OPEN_X86_64, 1, any_of, (_TMPFILE,), refuse)
    # The flags of these two are in memory. The C library falls back to the older call.
    for number in (_CLONE3, _OPENAT2):
        steps += [(equal, 0, 1, number), (give, 0, 0, unknown)]
    for number in (*_DENIED_EVERYWHERE, *_DENIED[machine]):
        steps += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (give, 0, 0, allow)])


def _filter_syscalls(program: bytes) -> None:
    """Apply the filter to this process."""
    buffer = ctypes.create_string_buffer(program)
    pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _check(_libc.prctl(_PR_SET_SECCOMP, 2, pointer, 0, 0), "no filter of system calls")


def limit(limits: dict[str, int]) -> None:
    """Set soft and hard limits by the names of the `resource` module."""
    for name, value in limits.items():
        number = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(number)
        most = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (most, most))


def _restore_signals() -> None:
    """Python ignores these two signals; the program must not inherit that."""
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _drop_rights() -> None:
    """Change from root to the folder's owner, or nobody; set-uid programs gain no rights."""
    if os.geteuid() == 0:
        uid = os.stat(".").st_uid or _NOBODY
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def _bubblewrap_command(program: str, bwrap: str, readable: list[str], syscalls: bool) -> list[str]:
    """The command line for bubblewrap: it builds the root, without network, and filters calls."""
    command = [bwrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--dev", "/dev"]
    for path in [each for each in readable if not each.startswith("/dev/")]:
        how = ("--symlink", os.readlink(path)) if os.path.islink(path) else ("--ro-bind", path)
        command += [*how, path]
    command += ["--ro-bind", program, program, "--bind", os.getcwd(), _WORK, "--chdir", _WORK]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]  # both use memory, uncounted
    if syscalls:
        fd = os.memfd_create("filter", 0)
        os.write(fd, _syscall_filter(_PID_IN_BUBBLEWRAP))
        os.lseek(fd, 0, os.SEEK_SET)
        command += ["--seccomp", str(fd)]
    return [*command, "--"]


def main(request: dict[str, object], argv: list[str]) -> None:
    """Confine this process and execute the program; returns only by an error."""
    parent = os.getppid()
    readable = [path for path in list(request["readable"]) if os.path.exists(path)]  # type: ignore[call-overload]
    files, network, syscalls = request["files"], bool(request["network"]), bool(request["syscalls"])
    program = os.open(argv[0], os.O_RDONLY)
    os.set_inheritable(program, True)  # the interpreter of a script opens it again
    if files == "bubblewrap":
        argv = [*_bubblewrap_command(argv[0], str(request["bwrap"]), readable, syscalls), *argv]
        program = os.open(argv[0], os.O_PATH)
    else:
        _enter_namespaces(network, files == "namespace")
    rules = _landlock(readable, program) if files == "landlock" else -1
    if files == "namespace":
        _build_root(readable)
    os.umask(0o077)
    limit(dict(request["limits"]))  # type: ignore[call-overload]
    _restore_signals()
    if files != "bubblewrap":  # it does this itself, and may be set-uid
        _drop_rights()
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(_FAILED)  # the parent died before the prctl call
    if rules >= 0:
        _check(_libc.syscall(446, rules, 0), "Landlock does not restrict us")
    if syscalls and files != "bubblewrap":
        _filter_syscalls(_syscall_filter(os.getpid()))
    os.execve(program, argv, _ENVIRONMENT)  # nosec B606 # no shell is the point


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main(json.loads(sys.argv[1]), sys.argv[2:])
        except (_Refused, OSError) as error:
            sys.stderr.write(f"confine: {error}\n")
            sys.exit(_FAILED)
