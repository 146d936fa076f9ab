"""PostgreSQL as operators run it, on loopback: behind a PgBouncer, and as a primary with a replica.

The pooler has the settings that it is shipped with but for its mode, addresses and login. Ports are
random; processes are ended by their own ids.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import asyncpg

from tenure.store.embedded import EmbeddedPostgres
from tests.ports import free_port
from tests.waiting import until

_ROOT = Path(__file__).resolve().parent.parent
_START_WITHIN_S = 30.0
_CONFIG = """
[databases]
* = host={host} port={server_port}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {folder}/users.txt
pool_mode = {mode}
"""


class PgBouncer:
    """A PgBouncer before a server; its logins are the server's."""

    def __init__(self, folder: Path, server_url: str, mode: str, settings: str = "") -> None:
        self.server_url = server_url
        self.port = free_port()
        server = urlsplit(server_url)
        config = _CONFIG.format(
            host=server.hostname,
            server_port=server.port,
            port=self.port,
            folder=folder,
            mode=mode,
        )
        (folder / "pgbouncer.ini").write_text(config + settings)
        (folder / "users.txt").write_text(f'"{server.username}" "{server.password}"\n')
        program = _program(folder)
        user = "nobody" if os.geteuid() == 0 else None  # it does not run as root
        for path in (folder, *folder.rglob("*")) if user else ():
            shutil.chown(path, user)
        self.log = folder / "log"
        self._command = [str(program), str(folder / "pgbouncer.ini")]
        self._user = user
        self.start()

    def start(self) -> None:
        """Start it; returns when it takes connections."""
        folder = self.log.parent
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=log,
                env={**os.environ, "LD_LIBRARY_PATH": str(folder / "libs")},
                cwd=folder,
                user=self._user,
            )
        self._wait()

    @property
    def url(self) -> str:
        """The URL of the server, by way of the pooler."""
        server = urlsplit(self.server_url)
        login = f"{server.username}:{server.password}"
        return server._replace(netloc=f"{login}@127.0.0.1:{self.port}").geturl()

    def end(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _START_WITHIN_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert self._process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)  # it says nowhere that it listens


def _program(folder: Path) -> Path:
    """A copy of PgBouncer and its libraries, where its user can read them.

    `TENURE_PGBOUNCER` names another one.
    """
    tools = _ROOT / ".tools"
    program = os.environ.get("TENURE_PGBOUNCER") or shutil.which(
        "pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:{tools}"
    )
    assert program, "no pgbouncer on PATH nor in .tools: bin/test brings it"
    if (tools / "pgbouncer.libs").exists():
        shutil.copytree(tools / "pgbouncer.libs", folder / "libs")
    return Path(shutil.copy(program, folder / "pgbouncer"))


@contextmanager
def pgbouncer(server_url: str, mode: str, settings: str = "") -> Generator[PgBouncer]:
    """A PgBouncer before a server, in `session` or `transaction` mode; ended at the end."""
    with tempfile.TemporaryDirectory(prefix="tenure-pgbouncer-") as folder:
        pooler = PgBouncer(Path(folder), server_url, mode, settings)
        try:
            yield pooler
        finally:
            pooler.end()


class Replicated:
    """A primary, and a replica of it that streams."""

    def __init__(self, folder: Path) -> None:
        self.primary = EmbeddedPostgres(folder / "primary", port=free_port())
        self.primary.start()
        self.primary.stop()
        _copy_of(folder / "primary", folder / "replica")
        self.primary.start()
        primary = urlsplit(self.primary.url)
        follows = f"host=127.0.0.1 port={primary.port} user={primary.username} "
        follows += f"password={primary.password}"
        cluster = folder / "replica" / "cluster"
        with (cluster / "postgresql.auto.conf").open("a") as settings:
            settings.write(f"primary_conninfo = '{follows}'\n")
        signal = cluster / "standby.signal"
        signal.touch()
        _give(signal, cluster)
        self.replica = EmbeddedPostgres(folder / "replica", port=free_port())
        self.replica.start()

    @property
    def url(self) -> str:
        """The URL that names the replica first, then the primary."""
        replica, primary = urlsplit(self.replica.url), urlsplit(self.primary.url)
        login = replica.netloc.rpartition("@")[0]
        hosts = f"127.0.0.1:{replica.port},127.0.0.1:{primary.port}"
        return replica._replace(netloc=f"{login}@{hosts}").geturl()

    async def replica_has_all(self) -> None:
        """Wait until the replica has all that the primary has written."""
        ask = "SELECT pg_current_wal_lsn()::text"
        position = await _value(self.primary.url, ask)

        async def has() -> bool:
            replayed = f"SELECT pg_last_wal_replay_lsn() >= '{position}'::pg_lsn"
            return bool(await _value(self.replica.url, replayed))

        await until(has, "the replica has all", within_s=60)

    async def promote(self) -> None:
        """Make the replica the primary."""
        assert await _value(self.replica.url, "SELECT pg_promote()")

    def end(self) -> None:
        """Stop both."""
        self.replica.stop_immediately()
        self.primary.stop_immediately()


@contextmanager
def replicated() -> Generator[Replicated]:
    """A primary and a replica; stopped at the end."""
    # Not in tmp_path, which the user of the servers may not enter.
    with tempfile.TemporaryDirectory(prefix="tenure-replicated-") as folder:
        Path(folder).chmod(0o711)
        servers = Replicated(Path(folder))
        try:
            yield servers
        finally:
            servers.end()


async def _value(url: str, query: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def _copy_of(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    for path in (target, *target.rglob("*")):
        _give(path, source / path.relative_to(target))


def _give(path: Path, like: Path) -> None:
    """Give a file the owner of another one."""
    found = like.stat()
    os.chown(path, found.st_uid, found.st_gid)
