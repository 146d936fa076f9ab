"""Becomes ffmpeg in a cage. Started as a fresh interpreter, with a JSON object and the command.

It gives up the network (an empty network namespace), the files outside the current folder, root's
rights, new rights through set-uid programs, the system calls that a codec never needs, and what the
limits forbid; then it becomes the program, opened before the rights went. It dies with its parent.
What it is asked for and the kernel refuses ends it with status 125 and the reason. It imports
nothing of Leasehold, and nothing that takes long to load.

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
_FAILED = 125  # as `env` and `timeout` say it: the wrapper failed, not the program
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
_ROOT, _WORK = "/tmp", "/attempt"  # nosec B108 # covered by a mount that the cage alone sees

# By machine: the number of the audit architecture, of clone, and of pivot_root.
_MACHINES = {"x86_64": (0xC000003E, 56, 155), "aarch64": (0xC00000B7, 220, 41)}
_CLONE3 = 435
# Networks and other processes; mounts, namespaces and foreign roots; modes, owners, links and
# devices; keys, modules, clocks, BPF and other ways into the kernel. Same numbers everywhere first.
_DENIED_EVERYWHERE = (424, 425, 426, 427, 428, 429, 430, 431, 432, 433, 434, 438, 442, 452)
_DENIED = {
    "x86_64": (
        *(41, 53, 57, 58, 62, 101, 200, 310, 311),
        *(155, 161, 165, 166, 167, 168, 272, 303, 304, 308),
        *(86, 88, 90, 91, 92, 93, 94, 133, 259, 260, 265, 266, 268),
        *(103, 135, 154, 159, 163, 164, 169, 170, 171, 172, 173, 175, 176, 179, 227),
        *(246, 248, 249, 250, 298, 313, 320, 321, 323),
    ),
    "aarch64": (
        *(117, 129, 130, 198, 199, 270, 271),
        *(39, 40, 41, 51, 97, 224, 225, 264, 265, 268),
        *(33, 36, 37, 52, 53, 54, 55),
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


def leave(network: bool, files: bool) -> None:
    """Into namespaces of our own. Without root a user namespace is needed for that."""
    flags = _CLONE_NEWNET * network
    flags |= (_CLONE_NEWNS | _CLONE_NEWIPC | _CLONE_NEWUTS) * files
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
    _check(_libc.syscall(_MACHINES[os.uname().machine][2], b".", b"."), "no root of our own")
    _check(_libc.umount2(b".", _MNT_DETACH), "the old root stays")
    os.chdir(_WORK)


def landlock(readable: list[str], program: int) -> int:
    """The rules of Landlock: read and execute these, read and write regular files here."""
    version = _check(_libc.syscall(444, None, 0, 1), "no Landlock")
    execute, write, read, read_folder, remove, make = (1 << bit for bit in (0, 1, 2, 3, 5, 8))
    truncate = 1 << 14 if version >= 3 else 0
    # All that this version knows of files, TCP, signals and abstract sockets is refused.
    bits = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    words = ((1 << bits) - 1, 3, 3)[: 1 if version < 4 else 2 if version < 6 else 3]
    attributes = struct.pack(f"={len(words)}Q", *words)
    rules = _check(_libc.syscall(444, attributes, len(attributes), 0), "no Landlock rules")
    of_files = execute | write | read | truncate
    allowed = {os.open(path, os.O_PATH): execute | read | read_folder for path in readable}
    allowed |= {program: execute | read}
    allowed |= {os.open(".", os.O_PATH): read | read_folder | write | truncate | make | remove}
    for fd, rights in allowed.items():
        mode = os.fstat(fd).st_mode
        if not stat.S_ISDIR(mode):
            rights = (rights | write * stat.S_ISCHR(mode)) & of_files
        rule = struct.pack("=Qi", rights, fd)
        _check(_libc.syscall(445, rules, 1, rule, 0), "no rule of Landlock")
    return rules


def syscall_filter() -> bytes:
    """A BPF program: processes cannot be made (threads can), and what is listed is refused."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise Refused(f"no filter for {machine}")
    architecture, clone, _ = _MACHINES[machine]
    load, equal, least, any_of, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse = 0x7FFF0000, 0x00050000 | errno.EPERM
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, architecture),
        (give, 0, 0, 0x80000000),  # of another architecture: the process ends
        (load, 0, 0, 0),
        (least, 0, 1, 0x40000000),  # x32 has other numbers for the same calls
        (give, 0, 0, refuse),
        (equal, 0, 1, _CLONE3),  # its flags cannot be read here; the C library then uses clone
        (give, 0, 0, 0x00050000 | errno.ENOSYS),
        (equal, 0, 4, clone),
        (load, 0, 0, 16),
        (any_of, 0, 1, _CLONE_THREAD),
        (give, 0, 0, allow),
        (give, 0, 0, refuse),
    ]
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
    """Root becomes nobody; and nothing that is executed from here on can gain rights."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)


def bubblewrapped(program: str, bwrap: str, readable: list[str], syscalls: bool) -> list[str]:
    """The command line by which bubblewrap builds the root, without network, and filters calls."""
    words = [bwrap, "--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--dev", "/dev"]
    for path in [each for each in readable if not each.startswith("/dev/")]:
        how = ("--symlink", os.readlink(path)) if os.path.islink(path) else ("--ro-bind", path)
        words += [*how, path]
    words += ["--ro-bind", program, program, "--bind", os.getcwd(), _WORK, "--chdir", _WORK]
    if syscalls:
        fd = os.memfd_create("filter", 0)
        os.write(fd, syscall_filter())
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
        filter_syscalls(syscall_filter())
    os.execve(program, argv, _ENVIRONMENT)  # nosec B606 # no shell is the point


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        try:
            main(json.loads(sys.argv[1]), sys.argv[2:])
        except (Refused, OSError) as error:
            sys.stderr.write(f"confine: {error}\n")
            sys.exit(_FAILED)
