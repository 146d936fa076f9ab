"""ffmpeg in every cage that this machine can build: it works, and reaches nothing outside."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import structlog

from tenure.core.errors import UsageError
from tenure.core.transcode import FormatName, Output
from tenure.transcode import cage as cage_module
from tenure.transcode.cage import (
    NOBODY,
    READABLE,
    Cage,
    Ended,
    Limits,
    file_methods,
    find_cage,
    give_to_cage,
)
from tenure.transcode.ffmpeg import Probe, convert_command, locate_ffmpeg
from tests.contract.egress.canary import canary

pytestmark = pytest.mark.clause("I-56")

LIMITS = Limits(memory_bytes=2**32, file_bytes=2**24, cpu_s=60, wall_s=60)
EPERM = str(int(errno.EPERM))
SECRET = "canary-of-another-tenant"
FFMPEG = str(locate_ffmpeg())
QUIET = [FFMPEG, "-hide_banner", "-nostdin", "-loglevel", "error"]
CONVERT = [*QUIET, "-i", "file:input", "-vf", "scale=64:48", "-movflags", "+faststart"]


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("clip") / "clip.mp4"
    drawing = ["-f", "lavfi", "-i", "testsrc=duration=1:size=160x120:rate=10"]
    sound = ["-f", "lavfi", "-i", "sine=duration=1"]
    subprocess.run([*QUIET, *drawing, *sound, str(file)], check=True)
    return file


@pytest.fixture(params=file_methods())
def cage(request: pytest.FixtureRequest) -> Cage:
    """All of a cage, with the files kept away in this manner."""
    return Cage("none", request.param, syscalls=True, namespace=request.param != "bubblewrap")


@pytest.fixture
def folder(clip: Path) -> Iterator[Path]:
    """The folder of an attempt, with a secret of another tenant beside it that all users may read.

    Not in pytest's folder, which other users may not enter: the cage alone has to hold.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name) / "attempt", Path(name) / "other"
        folder.mkdir(mode=0o700)
        (folder / "input").write_bytes(clip.read_bytes())
        (folder / "input").chmod(0o444)
        other.mkdir()
        (other / "secret.txt").write_text(SECRET)
        (other / "secret.txt").chmod(0o644)
        for open_to_all in (folder.parent, other):
            open_to_all.chmod(0o777)
        give_to_cage(folder)
        yield folder


async def run(cage: Cage, folder: Path, *argv: str, limits: Limits = LIMITS) -> Ended:
    return await cage.run(argv, folder=folder, limits=limits)


def with_tools(cage: Cage) -> Cage:
    return replace(cage, readable=(*cage.readable, "/bin", "/usr/bin"))


def tool(name: str) -> str:
    program = shutil.which(name)
    assert program, f"this machine has no {name}"
    return program


async def test_a_transcode_works_in_every_cage(cage: Cage, folder: Path) -> None:
    ended = await run(cage, folder, *CONVERT, "-threads", "4", "file:out.mp4")
    assert (ended.code, ended.stderr) == (0, "")
    assert (folder / "out.mp4").stat().st_size > 500
    assert (folder / "out.mp4").stat().st_mode & 0o777 == 0o600


async def test_every_format_is_made_in_every_cage(cage: Cage, folder: Path) -> None:
    for name in get_args(FormatName):
        output, probe = Output(name=f"out.{name}", format=name), Probe(1.0, True, True)
        words = convert_command(Path(FFMPEG), output, probe, threads=2)
        for again in ("made", "overwritten"):
            ended = await run(cage, folder, *words)
            assert (ended.code, ended.stderr) == (0, ""), f"{name} is not {again}"
        assert (folder / output.name).stat().st_size > 500


async def test_playlists_and_scripts_read_no_file_outside_the_folder(
    cage: Cage, folder: Path
) -> None:
    """ffmpeg is allowed every format and protocol here: the cage alone has to hold."""
    secret = folder.parent / "other" / "secret.txt"
    for name, text in {
        "list.ffconcat": f"ffconcat version 1.0\nfile '{secret}'\nfile /etc/passwd\n",
        "list.m3u8": f"#EXTM3U\n#EXTINF:1,\nfile://{secret}\n#EXT-X-ENDLIST\n",
    }.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o444)
        loose = ["-safe", "0"] if name.endswith("concat") else ["-allowed_extensions", "ALL"]
        ended = await run(cage, folder, *QUIET, *loose, "-i", name, "-f", "null", "-")
        assert ended.code != 0
        assert SECRET not in ended.stderr
    for path in (secret, "/etc/passwd"):
        copy = ["-f", "data", "-i", f"file:{path}", "-map", "0", "-c", "copy", "-f", "data", "-y"]
        loose_copy = await run(Cage(), folder, *QUIET, *copy, "file:copied")
        assert loose_copy.code == 0, "without a cage it is copied"
        stolen = await run(cage, folder, *QUIET, *copy, "file:stolen")
        assert stolen.code != 0
        assert "Permission denied" in stolen.stderr or "No such file" in stolen.stderr


async def test_nothing_is_written_outside_the_folder(cage: Cage, folder: Path) -> None:
    for target in (folder.parent / "other" / "out.mp4", "../out.mp4"):
        ended = await run(cage, folder, *CONVERT, "-y", f"file:{target}")
        assert ended.code != 0
        assert not (folder / target).exists()
        assert (await run(Cage(), folder, *CONVERT, "-y", f"file:{target}")).code == 0


async def test_no_address_is_reached_by_any_protocol(cage: Cage, folder: Path) -> None:
    async with canary() as bird:
        for url in (f"http://127.0.0.1:{bird.port}/a", f"tcp://127.0.0.1:{bird.port}"):
            assert (await run(cage, folder, *QUIET, "-i", url, "-f", "null", "-")).code != 0
        sent = ["-i", "file:input", "-c", "copy", "-f", "mpegts"]
        to_udp = await run(cage, folder, *QUIET, *sent, f"udp://127.0.0.1:{bird.port}")
        assert to_udp.code != 0
        # The filter alone will do where the kernel gives no namespace.
        filtered = Cage("none", syscalls=True)
        assert (await run(filtered, folder, *QUIET, "-i", url, "-f", "null", "-")).code != 0
    assert bird.hits == 0


async def test_no_process_is_started_and_threads_are_bounded(cage: Cage, folder: Path) -> None:
    """A fork bomb in the shell, for ffmpeg cannot be made to fork."""
    shell, program = with_tools(cage), tool("sh")
    bomb = "bomb() { bomb | bomb & }; bomb; true | echo forked > file"
    await run(shell, folder, program, "-c", bomb, limits=replace(LIMITS, wall_s=10))
    assert not (folder / "file").exists()
    # Where calls cannot be filtered, the limit of processes holds.
    many = "i=0; while [ $i -lt 300 ]; do sleep 5 & i=$((i+1)); done"
    few = replace(LIMITS, threads=100, wall_s=10)
    bounded = await run(replace(shell, syscalls=False), folder, program, "-c", many, limits=few)
    assert bounded.code != 0
    # At its start already, where the user's processes of an earlier test are not yet reaped.
    assert "fork" in bounded.stderr or "temporarily unavailable" in bounded.stderr
    narrow = replace(LIMITS, threads=1, wall_s=10)
    starved = await run(cage, folder, *CONVERT, "-threads", "4", "-y", "file:b.mp4", limits=narrow)
    assert starved.code != 0


async def test_a_file_grows_no_larger_than_its_limit(cage: Cage, folder: Path) -> None:
    small = replace(LIMITS, file_bytes=1_000)
    ended = await run(cage, folder, *CONVERT, "-y", "file:out.mp4", limits=small)
    assert ended.hit_file_limit
    assert (folder / "out.mp4").stat().st_size <= 1_000


@pytest.mark.parametrize("write", ["echo x > f$i", ": > f$i"], ids=["small", "empty"])
async def test_many_small_files_are_bounded_by_the_size_of_the_folder(
    cage: Cage, folder: Path, write: str
) -> None:
    many = f"i=0; while :; do {write}; i=$((i+1)); done"
    few = replace(LIMITS, folder_bytes=4_000_000)
    ended = await run(with_tools(cage), folder, tool("sh"), "-c", many, limits=few)
    assert ended.hit_file_limit
    assert ended.code < 0


async def test_files_in_folders_count_where_folders_can_be_made(folder: Path) -> None:
    many = "mkdir -p a/b; i=0; while :; do echo x > a/b/f$i; i=$((i+1)); done"
    few = replace(LIMITS, folder_bytes=4_000_000)
    assert (await run(Cage(), folder, tool("sh"), "-c", many, limits=few)).hit_file_limit


async def test_links_and_devices_cannot_be_made(cage: Cage, folder: Path) -> None:
    for words in (("ln", "-s", "/etc/passwd", "link"), ("ln", "input", "hard"), ("mkfifo", "pipe")):
        assert (await run(with_tools(cage), folder, tool(words[0]), *words[1:])).code != 0
    assert sorted(path.name for path in folder.iterdir()) == ["input"]


# A program that was taken over, played by Perl: it does the calls that its arguments name, and says
# how each was answered. Words are numbers, `zeros` and `one` are buffers, all else is a string.
TAKEN_OVER = r"""
my %buffers = (zeros => "\0" x 256, one => "\1" . "\0" x 255);
$| = 1;
for (@ARGV) {
    my @words = map { $_ eq "own" ? $$ : $_ } split / /;
    my $name = shift @words;
    my @call = map { /^-?\d+$/ ? $_ + 0 : exists $buffers{$_} ? $buffers{$_} : "$_\0" } @words;
    $! = 0;
    push @call, (0) x (6 - @call);
    my $answer = syscall($call[0], $call[1], $call[2], $call[3], $call[4], $call[5]);
    print "$name ", $answer >= 0 ? "done" : $! + 0, "\n";
}
"""
# By name: the numbers on x86-64 and on aarch64, if there is such a call.
NUMBERS = """
prlimit64 302 261; setpriority 141 140; ioprio_set 251 30; sched_setaffinity 203 122;
sched_setscheduler 144 119; sched_setparam 142 118; sched_setattr 314 274; kcmp 312 272;
get_robust_list 274 100; migrate_pages 256 238; move_pages 279 239; process_vm_readv 310 270;
ptrace 101 117; pidfd_open 434 434; process_madvise 440 440; process_mrelease 448 448;
fcntl 72 25; prctl 157 167; kill 62 129; tkill 200 130; tgkill 234 131; rt_sigqueueinfo 129 138;
rt_tgsigqueueinfo 297 240; memfd_create 319 279; shmget 29 194; shmat 30 196; shmctl 31 195;
msgget 68 186; msgctl 71 187; semget 64 190; semctl 66 191; mq_open 240 180; mkdir 83 -;
mkdirat 258 34; open 2 -; openat 257 56; unlink 87 -; unlinkat 263 35; rename 82 -;
renameat 264 38; renameat2 316 276; rmdir 84 -; fsetxattr 190 7; getpid 39 172; utime 132 -;
utimes 235 -; futimesat 261 -; utimensat 280 88; truncate 76 45; removexattr 197 14;
lremovexattr 198 15; inotify_init 253 -; inotify_init1 294 26; inotify_add_watch 254 27;
fanotify_init 300 262; fanotify_mark 301 263
"""
NUMBER = {
    name: number
    for name, *numbers in (entry.split() for entry in NUMBERS.split(";"))
    for number in [numbers[["x86_64", "aarch64"].index(os.uname().machine)]]
}


async def attack(cage: Cage, folder: Path, *calls: str) -> tuple[Ended, dict[str, str]]:
    """Do these calls in the cage; how it ended, and each call with its answer."""
    words = {}
    for call in calls:
        name, _, rest = call.partition(" ")
        if (number := NUMBER[name]) != "-":
            words[call] = f"{call.replace(' ', ',')} {number} {rest}".rstrip()
    answers: dict[str, str] = {}

    async def take(line: str) -> None:
        name, _, answer = line.partition(" ")
        answers[name.replace(",", " ")] = answer

    argv = [tool("perl"), "-e", TAKEN_OVER, *words.values()]
    ended = await with_tools(cage).run(argv, folder=folder, limits=LIMITS, line=take)
    assert answers.keys() == words.keys() or ended.code, ended.stderr
    return ended, answers


async def test_a_program_that_was_taken_over_does_nothing_to_other_processes(
    cage: Cage, folder: Path
) -> None:
    """Not to one of its own user: as that it would reach the worker, or other ffmpegs."""
    user = folder.stat().st_uid if os.geteuid() == 0 else None
    with subprocess.Popen([tool("sleep"), "60"], user=user, cwd="/") as victim:
        try:
            before = Path(f"/proc/{victim.pid}/limits").read_text()
            it = victim.pid
            _, answers = await attack(
                cage,
                folder,
                *(f"prlimit64 {it} 0 zeros 0", f"prlimit64 {it} 7 zeros 0"),
                *(f"setpriority 0 {it} 10", f"ioprio_set 1 {it} 24576"),
                *(f"sched_setaffinity {it} 128 one", f"sched_setscheduler {it} 3 zeros"),
                *(f"sched_setparam {it} zeros", f"sched_setattr {it} zeros 0"),
                *(f"kcmp {it} {it} 0 0 0", f"get_robust_list {it} zeros zeros"),
                *(f"migrate_pages {it} 64 one one", f"move_pages {it} 0 zeros zeros 0"),
                *(f"process_vm_readv {it} zeros 0 zeros 0", f"ptrace 16 {it} 0 0"),
                *(f"pidfd_open {it} 0", "process_madvise 1 zeros 0 4", "process_mrelease 1 0"),
                *(f"fcntl 1 8 {it}", "fcntl 1 10 9", "fcntl 1 15 zeros", "prctl 1 0 0 0"),
                *(f"rt_sigqueueinfo {it} 9 zeros", f"rt_tgsigqueueinfo {it} {it} 9 zeros"),
                *(f"kill {it} 9", f"tkill {it} 9", f"tgkill {it} {it} 9"),
            )
            assert {call: answer for call, answer in answers.items() if answer != EPERM} == {}
            assert len(answers) == 26
            assert victim.poll() is None
            assert Path(f"/proc/{victim.pid}/limits").read_text() == before
        finally:
            victim.kill()


async def test_nothing_is_kept_where_no_limit_counts_it(cage: Cage, folder: Path) -> None:
    """Memory outside of the address space, and files without a name in the folder."""
    nameless = os.O_TMPFILE | os.O_RDWR
    _, answers = await attack(
        cage,
        folder,
        *("memfd_create x 0", "shmget 0 4096 896", "shmat 0 0 0", "shmctl 0 2 zeros"),
        *("msgget 0 896", "msgctl 0 2 zeros", "semget 0 1 896", "semctl 0 0 2 zeros"),
        *("mq_open tenure-test 66 384 0", "mkdir sub 448", "mkdirat -100 sub2 448"),
        *(f"open . {nameless} 384", f"openat -100 . {nameless} 384", "fsetxattr 1 user.x y 1 0"),
        *("rename input a", "renameat -100 input -100 b", "renameat2 -100 input -100 c 0"),
        *("unlink input", "unlinkat -100 input 0", "rmdir sub"),
    )
    assert {call: answer for call, answer in answers.items() if answer != EPERM} == {}
    assert len(answers) >= 14
    assert [path.name for path in folder.iterdir()] == ["input"]


async def test_files_outside_are_neither_touched_truncated_watched_nor_opened_for_ioctl(
    cage: Cage, folder: Path
) -> None:
    """Landlock permits all of these by itself; another user's rights alone would not stop them."""
    secret = folder.parent / "other" / "secret.txt"
    secret.chmod(0o666)
    before = secret.stat()
    _, answers = await attack(
        cage,
        folder,
        *(f"utime {secret} 0", f"utimes {secret} 0", f"futimesat -100 {secret} 0"),
        *(f"utimensat -100 {secret} 0 0", f"truncate {secret} 0", f"open {secret} 3 0"),
        *(f"openat -100 {secret} 3 0", "inotify_init", "inotify_init1 0", "fanotify_init 0 0"),
        *(f"inotify_add_watch 0 {secret} 2", f"fanotify_mark 0 1 2 -100 {secret}"),
        *(f"removexattr {secret} user.x", f"lremovexattr {secret} user.x"),
    )
    assert {call: answer for call, answer in answers.items() if answer != EPERM} == {}
    assert len(answers) >= 9
    after = secret.stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)


async def test_a_cage_at_its_thread_limit_keeps_no_other_cage_from_starting_threads(
    cage: Cage, folder: Path
) -> None:
    """The shell's processes count as threads do, and need no program that was taken over."""
    limits, full = replace(LIMITS, threads=100, wall_s=60), asyncio.Event()
    many = "i=0; while [ $i -lt 98 ]; do sleep 60 & i=$((i+1)); done; echo full; wait"

    async def take(_line: str) -> None:
        full.set()

    with tempfile.TemporaryDirectory() as name:
        give_to_cage(Path(name))
        first = asyncio.create_task(
            with_tools(replace(cage, syscalls=False)).run(
                [tool("sh"), "-c", many], folder=Path(name), limits=limits, line=take
            )
        )
        try:
            async with asyncio.timeout(20):
                await full.wait()
            second = await run(
                cage, folder, *CONVERT, "-threads", "4", "file:out.mp4", limits=limits
            )
            assert not first.done()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
    assert (second.code, second.stderr) == (0, "")


async def test_a_line_that_is_too_long_is_skipped(folder: Path) -> None:
    lines: list[str] = []

    async def take(line: str) -> None:
        lines.append(line)

    long = 'print "a" x 3e6, "\nprogress=continue\n", "b" x 3e6'
    argv = [tool("perl"), "-e", long]
    ended = await with_tools(Cage()).run(argv, folder=folder, limits=LIMITS, line=take)
    assert (ended.code, ended.stderr) == (0, "")
    assert "progress=continue" in lines
    assert max(map(len, lines)) <= 65_536


async def test_a_program_in_the_cage_can_still_abort_and_read_its_own_limits(
    cage: Cage, folder: Path
) -> None:
    own = ("prlimit64 0 7 0 zeros", "sched_setaffinity 0 128 one", "fcntl 1 3 0")
    ended, answers = await attack(cage, folder, *own, "tgkill own own 6", "getpid")
    assert answers == dict.fromkeys(own, "done")
    assert ended.code in (-signal.SIGABRT, 128 + signal.SIGABRT)  # the second as bubblewrap says it


@pytest.mark.parametrize("view", ["open", "landlock", "namespace"])
async def test_queues_and_shared_memory_of_the_machine_are_out_of_reach(
    view: str, folder: Path
) -> None:
    cage = Cage("none", view, namespace=True, readable=(*READABLE, "/proc"))
    lines: list[str] = []

    async def take(line: str) -> None:
        lines.append(line)

    argv = [tool("readlink"), "/proc/self/ns/ipc"]
    await with_tools(cage).run(argv, folder=folder, limits=LIMITS, line=take)
    assert lines[0].startswith("ipc:")
    assert lines[0] != str(Path("/proc/self/ns/ipc").readlink())


AS_ORDINARY_USER = """
import ctypes, importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("confine", sys.argv[1])
confine = importlib.util.module_from_spec(spec)
spec.loader.exec_module(confine)
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # dumpable, as a program of that user would be
confine.main(json.loads(sys.argv[2]), sys.argv[3:])
"""


@pytest.fixture(scope="module")
def public_ffmpeg() -> Iterator[str]:
    """A copy that an ordinary user may execute, wherever this environment lies."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield shutil.copy(FFMPEG, folder)


@pytest.mark.parametrize(
    "view", ["landlock", "namespace", *(["bubblewrap"] if shutil.which("bwrap") else [])]
)
def test_an_ordinary_user_has_the_same_cage(view: str, folder: Path, public_ffmpeg: str) -> None:
    """Without root it takes a user namespace."""
    folder.parent.parent.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    cage = Cage("none", view, syscalls=True, namespace=view != "bubblewrap")
    launch = [sys.executable, "-c", AS_ORDINARY_USER, str(cage_module._LAUNCHER)]

    def caged(*argv: str) -> subprocess.CompletedProcess[bytes]:
        words = [*launch, cage.request(LIMITS), public_ffmpeg, *argv]
        return subprocess.run(words, cwd=folder, capture_output=True, timeout=60)

    made = caged(*CONVERT[1:], "-y", "file:out.mp4")
    assert (made.returncode, made.stderr) == (0, b"")
    assert (folder / "out.mp4").stat().st_uid == (NOBODY if os.geteuid() == 0 else os.geteuid())
    secret = folder.parent / "other" / "secret.txt"
    copy = ["-f", "data", "-i", f"file:{secret}", "-map", "0", "-c", "copy", "-f", "data"]
    assert caged(*QUIET[1:], *copy, "-y", "file:stolen").returncode != 0
    assert not (folder / "stolen").exists() or SECRET not in (folder / "stolen").read_text()


def lacking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *parts: str) -> None:
    """A kernel that refuses these parts, played by a launcher that says so."""
    launcher = tmp_path / "confine.py"
    launcher.write_text(
        "import json, sys\n"
        "asked = json.loads(sys.argv[1])\n"
        "given = {'network': asked['network'], 'syscalls': asked['syscalls'],"
        " 'files': asked['files'] != 'open'}\n"
        f"missing = [part for part in {parts!r} if given[part]]\n"
        "sys.exit(f'confine: no {missing[0]} here' if missing else 0)\n"
    )
    monkeypatch.setattr(cage_module, "_LAUNCHER", launcher)
    monkeypatch.setattr(cage_module, "find_cage", find_cage.__wrapped__)


def test_each_part_that_is_missing_is_said_in_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(tmp_path, monkeypatch, "network", "syscalls", "files")
    with structlog.testing.capture_logs() as said:
        cage = cage_module.find_cage(Path(FFMPEG))
    assert (cage.network, cage.files, cage.syscalls) == ("shared", "open", False)
    assert [line["event"] for line in said if line["log_level"] == "warning"] == [
        "ffmpeg may use every system call",
        "ffmpeg may read what other users may, and write where they may",
        "ffmpeg runs with the worker's network",
    ]
    assert "landlock: no files here" in cage.lacks["files"]


@pytest.mark.parametrize("part", ["files", "syscalls"])
def test_a_worker_does_not_start_without_a_part_that_is_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    lacking(tmp_path, monkeypatch, part)
    with pytest.raises(UsageError, match=f"ffmpeg must not run here.*no {part} here"):
        cage_module.find_cage(Path(FFMPEG), (), (part,))
    assert part in cage_module.find_cage(Path(FFMPEG), ()).lacks


def test_the_filter_takes_the_place_of_a_network_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking(tmp_path, monkeypatch, "network")
    cage = cage_module.find_cage(Path(FFMPEG), (), ("network",))
    assert (cage.network, cage.namespace, cage.syscalls) == ("none", False, True)


def test_an_unknown_part_of_the_cage_is_refused_by_its_name() -> None:
    with pytest.raises(UsageError, match="'memory' is no part of the cage"):
        find_cage(Path(FFMPEG), (), ("memory",))


def test_this_machine_gives_every_part() -> None:
    cage = find_cage(Path(FFMPEG))
    assert (cage.network, cage.files, cage.syscalls, cage.lacks) == ("none", "landlock", True, {})
