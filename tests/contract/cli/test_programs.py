"""The programs of examples/: each does what it says, and is as long as the documentation says."""

from __future__ import annotations

import io
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tokenize
import urllib.request
from ast import Constant, Expr, Import, ImportFrom, parse, walk
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.contract.cli.conftest import Program, wait_until

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "howto" / "examples.md"
NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


class Stand:
    """The examples in a folder of their own, with queues of their own."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        mark = secrets.token_hex(4)
        self.folder = folder
        limit = "limit_max=2&limit_ms=1000"
        self.environment = {
            "TENURE_QUEUES_MAIN_URL": f"streams+{redis_url}?namespace=t{mark}:",
            "TENURE_QUEUES_MAIL_URL": f"bullmq+{redis_url}?queue=mail{mark}",
            "TENURE_QUEUES_LIMITED_URL": f"bullmq+{redis_url}?queue=limited{mark}&{limit}",
        }
        self.programs: list[Program] = []

    def start(self, *words: str, module: str = "tenure.cli") -> Program:
        self.programs.append(Program(list(words), self.folder, self.environment, module=module))
        return self.programs[-1]

    def work(self, name: str, queue: str = "main") -> None:
        self.start("worker", name, "--queue", queue).heard("worker starts")

    def run(self, name: str) -> str:
        """What the program prints."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith("TENURE_")}
        done = subprocess.run(
            [sys.executable, name],
            cwd=self.folder,
            env=clean | self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def stand(tmp_path: Path, redis_url: str) -> Iterator[Stand]:
    for file in EXAMPLES.iterdir():
        if file.is_file():
            shutil.copy(file, tmp_path)
    made = Stand(tmp_path, redis_url)
    yield made
    for program in reversed(made.programs):
        program.kill()


@pytest.mark.parametrize(
    ("name", "queue", "prints"),
    [
        ("await_result.py", "main", "Hello, Ada"),
        ("rate_limit.py", "limited", "five jobs took 2 s"),
        ("unique.py", "mail", "True the report of May"),
        ("progress_and_cancel.py", "main", "at 3 requested\ncancelled"),
        ("backoff.py", "main", "attempt 3"),
        ("pydantic_models.py", "main", "9.0"),
        ("fan_in.py", "main", "6\n4"),
    ],
)
def test_a_program_prints_what_it_is_for(stand: Stand, name: str, queue: str, prints: str) -> None:
    stand.work(name, queue)
    assert stand.run(name) == prints


def post(url: str) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30) as answer:
        return str(answer.read().decode())


def test_flask_submits_and_awaits(stand: Stand, free_port: int) -> None:
    stand.work("await_result.py")
    app = stand.start("--app", "flask_app", "run", "--port", str(free_port), module="flask")
    app.heard("Running on")
    said = post(f"http://127.0.0.1:{free_port}/greetings/Ada")
    assert json.loads(said) == {"text": "Hello, Ada"}


def test_fastapi_submits_awaits_and_works(stand: Stand, free_port: int) -> None:
    app = stand.start("fastapi_app:app", "--port", str(free_port), module="uvicorn")
    app.heard("Uvicorn running")
    assert post(f"http://127.0.0.1:{free_port}/greetings/Ada") == '"Hello, Ada"'


def test_a_task_runs_by_the_clock(stand: Stand) -> None:
    stand.work("cron.py")
    wait_until(lambda: listed(stand, "schedules"), every_s=0.5)
    (schedule,) = listed(stand, "schedules")
    assert (schedule["cron"], schedule["tz"]) == ("0 3 * * *", "Europe/Berlin")
    program = stand.folder / "cron.py"
    program.write_text(program.read_text().replace("0 3 * * *", "* * * * * *"))
    stand.work("cron.py")
    wait_until(lambda: "done" in [job["state"] for job in listed(stand, "ls")], every_s=0.5)


def listed(stand: Stand, command: str) -> list[dict[str, Any]]:
    """What a command lists of the queue `main`."""
    program = stand.start(command, "--queue", "main", "--json")
    assert program.ended() == 0, program.words
    return [json.loads(line) for line in program.out]


def test_a_model_is_loaded_once(stand: Stand) -> None:
    worker = stand.start("model_once.py", module="")
    worker.heard("loading the model")
    for price in ("4.5", "4.5"):
        words = ["submit", "price", "-d", '{"item": "tea"}', "--wait", "--timeout", "30"]
        asked = stand.start(*words, "--queue", "main")
        assert asked.ended() == 0
        assert asked.out == [price]
    assert sum("loading the model" in line for line in worker.out) == 1


def test_the_test_without_redis_passes(stand: Stand) -> None:
    done = stand.start(
        *("-q", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto", "test_await_result.py"),
        module="pytest",
    )
    assert done.ended() == 0, done.words


def code_lines(path: Path) -> int:
    """The lines with code: no imports, no docstrings, no comments, no empty lines."""
    text = path.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    lines = {
        number
        for token in tokens
        if token.type not in NO_CODE
        for number in range(token.start[0], token.end[0] + 1)
    }
    for node in walk(parse(text)):
        is_text = isinstance(node, Expr) and isinstance(node.value, Constant)
        if is_text or isinstance(node, Import | ImportFrom):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def test_every_program_is_as_long_as_the_page_says() -> None:
    shown = dict(re.findall(r"\]\(\.\./\.\./examples/([\w/]+\.py)\) \| (\d+) \|", PAGE.read_text()))
    assert {name: int(count) for name, count in shown.items()} == {
        name: code_lines(EXAMPLES / name) for name in shown
    }
    peers = {f"peers/{path.name}" for path in (EXAMPLES / "peers").glob("*.py")}
    assert peers <= shown.keys()
    assert len(shown.keys() - peers) == 12


def test_submitting_and_awaiting_takes_three_lines() -> None:
    text = (EXAMPLES / "await_result.py").read_text()
    body = text.partition("async def main() -> None:\n")[2].partition("\n\n")[0]
    assert len(body.splitlines()) <= 3
