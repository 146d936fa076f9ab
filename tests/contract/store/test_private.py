"""What we keep on disk is for its owner alone, whatever the umask is."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tenure.core.errors import UsageError
from tenure.store.embedded import EmbeddedPostgres
from tenure.store.files import private_database, private_folder, write_private

NOBODY = 65_534
UMASKS = ["000", "022", "777"]

BUSY = """
import asyncio, os, sys
from pathlib import Path
os.umask(int(sys.argv[1], 8))
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.store.embedded import EmbeddedRedis
from tenure.store.file_notifier import Listener
from tenure.webhooks.receiver import SqliteNonces

async def main():
    queue = open_queue(f"inbox+sqlite:///{Path.cwd()}/jobs.db", worker_id="w")
    await queue.submit([NewJob(task="transcode", payload=b"{}", requester="acme")])
    nonces = SqliteNonces("nonces.db")
    listener = Listener(Path("jobs.db-pipes"), "topic", lambda: None)
    assert listener.open()
    server = EmbeddedRedis(Path("redis"), with_password=True)
    server.start()
    print("ready", flush=True)
    sys.stdin.read()
    server.stop()
    await queue.close()

asyncio.run(main())
"""


def open_to_others(folder: Path) -> list[str]:
    """What is not 0600, or 0700 for folders and sockets; links have no mode of their own."""
    wrong = []
    for path in folder.rglob("*"):
        mode = path.lstat().st_mode
        wanted = 0o700 if stat.S_ISDIR(mode) or stat.S_ISSOCK(mode) else 0o600
        if not stat.S_ISLNK(mode) and stat.S_IMODE(mode) != wanted:
            wrong.append(f"{stat.S_IMODE(mode):04o} {path.relative_to(folder)}")
    return wrong


@pytest.mark.parametrize("umask", UMASKS)
def test_stores_keep_their_files_from_other_users_whatever_the_umask(
    tmp_path: Path, umask: str
) -> None:
    command = [sys.executable, "-c", BUSY, umask]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as busy:
        assert busy.stdout is not None
        assert busy.stdout.readline() == "ready\n"
        names = {path.name for path in tmp_path.rglob("*")}
        found = open_to_others(tmp_path)
        busy.communicate(timeout=30)
    expected = {"jobs.db", "jobs.db-wal", "jobs.db-shm", "jobs.db-lock", "jobs.db-next"}
    assert names >= expected | {
        "jobs.db-pipes",
        "nonces.db",
        "redis.conf",
        "password",
        "redis.sock",
    }
    assert found == []


def test_a_database_that_was_open_to_others_is_tightened(tmp_path: Path) -> None:
    for name in ("jobs.db", "jobs.db-wal", "jobs.db-shm"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
    private_database(tmp_path / "jobs.db")
    assert open_to_others(tmp_path) == []


def test_a_private_file_is_written_whole_and_replaces_a_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    (tmp_path / "key").symlink_to(elsewhere)
    write_private(tmp_path / "key", "secret")
    assert (elsewhere.read_text(), (tmp_path / "key").read_text()) == ("kept", "secret")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "key"]


def test_an_open_folder_is_tightened_if_it_is_ours_and_refused_if_it_holds_other_files(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a" / "b"
    private_folder(folder)
    assert open_to_others(tmp_path) == []
    folder.chmod(0o755)
    private_folder(folder)
    assert open_to_others(tmp_path) == []
    (folder / "letters").touch(0o600)
    folder.chmod(0o755)
    with pytest.raises(UsageError, match=rf"mode 0755.*chmod 700 {folder}"):
        private_folder(folder, mark="worker.key")
    private_folder(folder, mark="letters")
    assert open_to_others(tmp_path) == []


def test_a_folder_or_link_of_another_user_is_refused(tmp_path: Path) -> None:
    if os.geteuid() != 0:  # an ordinary user owns nothing of others; / is root's
        with pytest.raises(UsageError, match="belongs to user 0"):
            private_folder(Path("/"))
        return
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    for folder in (theirs, ours):
        folder.mkdir(mode=0o700)
    os.chown(theirs, NOBODY, NOBODY)
    with pytest.raises(UsageError, match=f"belongs to user {NOBODY}"):
        private_folder(theirs)
    link = tmp_path / "link"
    link.symlink_to(ours)
    private_folder(link)
    os.lchown(link, NOBODY, NOBODY)
    with pytest.raises(UsageError, match="is no folder"):
        private_folder(link)


def test_the_folder_of_a_postgres_is_its_servers_alone() -> None:
    server = EmbeddedPostgres()
    server.start()
    try:
        assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
        assert open_to_others(server.data_dir / "cluster") == []
        assert stat.S_IMODE((server.data_dir / "password").stat().st_mode) == 0o600
        command = Path(f"/proc/{server.pid}/cmdline").read_text()
        assert (server.data_dir / "password").read_text().strip() not in command
    finally:
        server.stop()
