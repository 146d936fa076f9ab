"""Text of strangers on a terminal: it is shown, and never obeyed."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tenure.cli.config import Config
from tenure.cli.console import paint, shown, table
from tenure.cli.serve import set_up_logs
from tenure.contracts.streams.ledger import StreamsLedger
from tenure.core.job import NewJob
from tenure.core.registry import open_ledger
from tenure.store.redis import Redis
from tests.contract.cli.conftest import Cli
from tests.contract.cli.test_looking import submit

# Clear the screen, set the title, answer back, C1's CSI, overwrite the line, mirror the rest.
CANARY = "a\x1b[2J\x1b]0;owned\x07\x1b[31m\x9b2J\x85\r\x08\x7f\u202egnp\u2066\u200f\u2028z"
OBEYED = set(CANARY) - set("a[2J]0;owned[31mgnpz")


def obeyed(text: str) -> list[str]:
    return sorted(OBEYED & set(text))


def plant(queue_url: str) -> str:
    """A job as another program may leave it: every text of it is the canary."""
    (job_id,) = submit(queue_url, NewJob(task="t", payload=b"{}"))
    evil = json.dumps({"message": CANARY, "code": CANARY}, ensure_ascii=False).encode()

    async def overwrite() -> None:
        ledger = open_ledger(queue_url)
        assert isinstance(ledger, StreamsLedger)
        redis = Redis(queue_url.removeprefix("streams+").partition("?")[0])
        try:
            key = ledger._job_key(job_id)
            texts = {"task": CANARY, "status": CANARY, "payload": evil, "error": evil,
                     "progress": evil, "requester": CANARY}  # fmt: skip
            await redis.call("HSET", key, *(part for pair in texts.items() for part in pair))
            await redis.call("COPY", key, ledger._job_key(CANARY))
            await redis.call("ZADD", ledger._keys[6], 2_000_000_000_000, CANARY)
            await redis.call(
                "XADD", f"{key}:events", "*", "type", CANARY, "step", CANARY + "\nx", "data", evil
            )
        finally:
            await redis.close()
            await ledger.close()

    asyncio.run(overwrite())
    return job_id


def test_no_command_writes_what_a_terminal_would_obey(cli: Cli, queue_url: str) -> None:
    job_id = plant(queue_url)
    asked = [
        ["ls"], ["ls", "--json"], ["inspect", job_id], ["inspect", job_id, "--json"],
        ["inspect", CANARY], ["inspect", CANARY.replace("a", "b")], ["queues"], ["workers"],
        ["dead"], ["dead", "--json"], ["top", "--once"], ["retry", CANARY], ["cancel", CANARY],
        ["remove", CANARY + "x"], ["ls", "--state", CANARY], [CANARY], ["watch", CANARY + "x"],
        ["keys", "revoke", CANARY], ["inspect", CANARY + "x", "--json"], ["submit", CANARY],
    ]  # fmt: skip
    for words in asked:
        said = cli(*words)
        assert obeyed(said.out + said.err) == [], (words, said)
    seen = cli("inspect", job_id)
    assert seen.code == 0, seen
    assert r"\x1b[2J" in seen.out
    assert "\nx" not in seen.out, "an event is one line"
    assert cli("inspect", job_id, "--json").lines[0]["error"]["message"] == CANARY


def test_only_our_own_colours_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    painted = shown(paint(CANARY, "red", Terminal()))
    assert painted.startswith("\x1b[31m")
    assert painted.endswith("\x1b[0m")
    assert obeyed(painted[5:-4]) == []
    rows = shown(table(["A"], [["one\ntwo"], [CANARY]])).splitlines()
    assert len(rows) == 3, rows


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    set_up_logs(Config({"TENURE_LOG_FORMAT": "text"}, tmp_path))
    yield said
    structlog.reset_defaults()
    root.handlers[:], root.level = before, level


def test_text_logs_hold_nothing_that_a_terminal_would_obey(logs: io.StringIO) -> None:
    log: Any = structlog.get_logger("x")
    log.warning(CANARY, job=CANARY, dashes=CANARY.replace("a", "-"), more={"deep": [CANARY]})
    log.warning("two lines", name="one\n12:00:00 [info] forged")
    try:
        raise ValueError(CANARY)
    except ValueError:
        log.exception("failed", task=CANARY)
    logging.getLogger("lib").error("%s", CANARY)
    said = logs.getvalue()
    assert obeyed(said) == []
    assert said.count("owned") >= 6
    assert not any(line.startswith("12:00:00 [info] forged") for line in said.splitlines())
    assert "Traceback" in said
