"""Python processes for Spark come ready: what is asked of the launcher, a forked child does."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tenure.pipeline import fork_server

ROOT = Path(__file__).resolve().parents[2]
ASK = (
    "import os, sys; print(os.getppid(), 'pyarrow' in sys.modules, os.environ['WORD']); sys.exit(7)"
)


@pytest.fixture(scope="module")
def launcher() -> str:
    return fork_server.launcher()


def run(program: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *words], env=os.environ | {"WORD": "yes"}, capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip


def test_a_child_has_everything_imported_and_its_own_environment_words_and_end(
    launcher: str,
) -> None:
    done = run(launcher, "-c", ASK)
    server = fork_server._Running.server
    assert server is not None
    assert done.stdout.split() == [str(server.pid), "True", "yes"]
    assert done.returncode == 7
    assert fork_server.launcher() == launcher, "one server for the whole process"


def test_a_module_runs_as_python_itself_would_run_it(launcher: str) -> None:
    words = ("-m", "json.tool", "--compact", "/dev/stdin")
    done = subprocess.run([launcher, *words], input='{"a": 1}', capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ('{"a":1}\n', "", 0)
    broken = run(launcher, "-c", "raise ValueError('as said')")
    assert broken.returncode == 1
    assert "ValueError: as said" in broken.stderr


def test_whoever_ends_the_launcher_ends_the_child(launcher: str) -> None:
    words = ("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)")
    with subprocess.Popen([launcher, *words], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = psutil.Process(int(process.stdout.readline()))
        process.send_signal(signal.SIGTERM)
        child.wait(timeout=30)


def test_without_a_server_the_launcher_is_python(launcher: str, tmp_path: Path) -> None:
    alone = fork_server._write(tmp_path, str(tmp_path / "nobody.sock"))
    done = run(alone, "-c", "import sys; print(sys.executable, 'pyarrow' in sys.modules)")
    assert done.stdout.split() == [sys.executable, "False"]


def test_the_server_ends_with_its_driver() -> None:
    code = (
        "import os; from tenure.pipeline import fork_server as f; f.launcher();"
        "print(f._Running.server.pid, f._Running.launcher, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    number, launcher = done.stdout.split()
    server = int(number)
    if psutil.pid_exists(server):
        psutil.Process(server).wait(timeout=60)
    assert not psutil.pid_exists(server)
    assert not Path(launcher).parent.exists(), "and leaves nothing behind"


def test_a_launcher_that_ends_with_its_child_does_not_end_the_server() -> None:
    ours, launcher = socket.socketpair()
    child = os.fork()
    if child == 0:
        os._exit(0)
    pidfd = os.pidfd_open(child)
    watching = selectors.DefaultSelector()
    keys = [
        watching.register(file, selectors.EVENT_READ, (child, ours, pidfd))
        for file in (pidfd, ours)
    ]
    launcher.close()
    for key in keys:  # as one look at the selector gives them
        fork_server._ended(key, watching)
    assert not watching.get_map()
