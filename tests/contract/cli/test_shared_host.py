"""`tenure up` on a machine with other users: they reach nothing and read no password."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

import tenure
from tenure.core.errors import ServerError
from tenure.store.embedded import EmbeddedPostgres
from tenure.store.redis import Redis
from tests.contract.cli.conftest import Program
from tests.contract.cli.upped import Up, children
from tests.contract.store.test_private import open_to_others
from tests.ports import free_port

APP = """
from tenure import task

@task("greet")
async def greet(job):
    return "hello"
"""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    postgres = EmbeddedPostgres()
    before = os.umask(0)
    try:
        url = postgres.start()
        up = Up(tmp_path_factory.mktemp("up"), free_port(), "--no-samples", TENURE_POSTGRES_URL=url)
    finally:
        os.umask(before)
    yield up
    up.program.kill()
    postgres.stop()


def announced(up: Up) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((up.folder / ".tenure" / "up.json").read_text())
    return found


def passwords(up: Up) -> set[str]:
    urls = [urlsplit(url) for url in announced(up)["queues"]]
    return {url.password for url in urls if url.password}


async def test_a_store_of_up_answers_only_who_knows_its_password(up: Up) -> None:
    url = urlsplit(announced(up)["redis_url"])
    stranger = Redis(f"redis://127.0.0.1:{url.port}/0")
    with pytest.raises(ServerError, match="NOAUTH"):
        await stranger.call("KEYS", "*")
    await stranger.close()
    assert url.password
    assert len(url.password) >= 32


def test_no_password_stands_in_a_command_line_or_in_what_up_says(up: Up) -> None:
    secrets = passwords(up)
    assert len(secrets) == 2, "one of Redis, one of PostgreSQL"
    parts = [up.program.process.pid, *children(up.program.process.pid, "")]
    assert len(parts) >= 4
    for pid in parts:
        process = Path(f"/proc/{pid}")
        shown = (process / "cmdline").read_bytes().decode()
        assert not [secret for secret in secrets if secret in shown], shown
        assert stat.S_IMODE((process / "environ").stat().st_mode) == 0o400
    said = up.program.words + "\n".join(up.program.out)
    assert not [secret for secret in secrets if secret in said]


def test_the_data_of_up_are_private_with_an_open_umask(up: Up) -> None:
    up.call("submit", "chat", "-d", '{"prompt": "hi"}')
    data = up.folder / ".tenure"
    assert stat.S_IMODE(data.stat().st_mode) == 0o700
    assert open_to_others(data) == []


def test_other_commands_of_the_same_user_find_the_store_and_show_no_password(up: Up) -> None:
    job_id = up.call("submit", "chat", "-d", '{"prompt": "hi"}')[0]["job_id"]
    assert up.call("inspect", job_id)[0]["job_id"] == job_id
    shown = [row["url"] for row in up.call("queues")]
    assert shown[0].startswith("streams+redis://:***@127.0.0.1:")
    # What was shown can be copied: the words of the user's own commands are completed here.
    assert job_id in {job["job_id"] for job in up.call("ls", "--queue", shown[0])}
    assert job_id in {job["job_id"] for job in up.call("ls", f"--queue={shown[0]}")}
    shown_url = Program(["config", "show", "redis_url", "--reveal"], up.folder, {})
    assert shown_url.ended() == 0
    assert shown_url.out == [announced(up)["redis_url"]], "for programs that are not ours"
    config = Program(["config", "show", "--json"], up.folder, {})
    assert config.ended() == 0
    secrets = passwords(up)
    assert not [secret for secret in secrets if secret in "\n".join(config.out)]


def test_worker_processes_hide_the_passwords_of_their_queues(up: Up) -> None:
    url = next(each for each in announced(up)["queues"] if each.startswith("inbox+postgres"))
    password = urlsplit(url).password
    assert password
    (up.folder / "app.py").write_text(APP)
    args = ["worker", "app.py", "--processes", "2"]
    workers = Program(args, up.folder, {"TENURE_WORKER_QUEUES": url})
    try:
        workers.heard("worker starts", count=2)
        herd = children(workers.process.pid, "\0worker\0")
        assert len(herd) == 2
        for pid in (workers.process.pid, *herd):
            shown = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert password not in shown
    finally:
        workers.kill()


def test_a_password_on_a_command_line_is_warned_of_and_a_file_is_not(
    up: Up, tmp_path: Path
) -> None:
    url = announced(up)["queue_url"]
    warned = Program(["queues", "-q", url], tmp_path, {})
    assert warned.ended() == 0
    assert "every user of this machine can read a password" in warned.words
    assert str(urlsplit(url).password) not in warned.words
    file = tmp_path / "queues"
    file.write_text(f"{url}\n")
    quiet = Program(["top", "--once"], tmp_path, {"TENURE_WORKER_QUEUES_FILE": str(file)})
    assert quiet.ended() == 0
    assert "password" not in quiet.words


def test_a_data_folder_open_to_others_is_refused_with_the_remedy(tmp_path: Path) -> None:
    data = tmp_path / "shared"
    data.mkdir()
    (data / "letters").touch()
    data.chmod(0o755)
    refused = Program(["up", "--port", str(free_port()), "--data", str(data)], tmp_path, {})
    assert refused.ended() == 2
    assert f"chmod 700 {data}" in refused.words


PLANTED = """
import os, pathlib
pathlib.Path(__file__).with_name(f"imported.{os.getpid()}").touch()
raise SystemExit(9)
"""


def planted(folder: Path) -> Path:
    """A folder like /tmp, in which another user has put modules."""
    for name in ("structlog", "msgspec", "uvloop", "memory_profiler"):
        (folder / f"{name}.py").write_text(PLANTED)
    (folder / "app.py").write_text(APP)
    folder.chmod(0o1777)
    return folder


@pytest.mark.parametrize(
    "words", [["up", "app.py", "--no-samples"], ["worker", "app.py", "--processes", "2"]]
)
def test_no_part_imports_what_others_put_into_the_current_folder(
    words: list[str], tmp_path: Path, queue_url: str
) -> None:
    folder = planted(tmp_path)
    if words[0] == "up":
        words = [*words, "--port", str(free_port())]
    program = Program(words, folder, {"TENURE_QUEUE_URL": queue_url, "PYTHONSAFEPATH": ""}, "-P")
    try:
        program.heard("tenure is up" if words[0] == "up" else "worker starts")
    finally:
        program.signal(signal.SIGINT)
        program.ended()
    assert not list(folder.glob("imported.*")), program.words


def test_every_python_that_is_started_is_kept_from_the_current_folder() -> None:
    source = Path(tenure.__file__).parent
    started = re.compile(r"sys\.executable(?:,|\})\s*\"?(-\w+)")
    found = {
        f"{path.relative_to(source)} {option}"
        for path in source.rglob("*.py")
        for option in started.findall(path.read_text())
    }
    assert len(found) >= 7
    assert not [each for each in found if not each.endswith((" -P", " -I"))]


def test_a_python_of_spark_imports_nothing_from_a_folder_of_others(tmp_path: Path) -> None:
    code = (
        "import os, sys; from tenure.pipeline.fork_server import Request, _become\n"
        "ask = ['-c', 'import sys; print(sys.path)']\n"
        "_become(Request(argv=ask, env=dict(os.environ), cwd=sys.argv[1]), [])"
    )
    for mode, is_there in ((0o755, True), (0o1777, False)):
        tmp_path.chmod(mode)
        words = [sys.executable, "-P", "-c", code, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        path = ast.literal_eval(done.stdout)
        assert (path[-1] == str(tmp_path)) is is_there
        assert str(tmp_path) not in path[:-1]
