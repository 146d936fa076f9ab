"""The commands as a user types them, one after the other, in one process of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest

from tests.chaos.sim.test_verdict import a_stale_token_is_accepted, sound
from tests.spark.working import journal_of, work

ROOT = Path(__file__).resolve().parents[2]
# Each line of words is a command; after each, its exit code.
RUNNER = """
import json, sys
from leasehold.cli.group import run
from tests.spark.working import SMALL
for words in json.load(sys.stdin):
    small = [f"--conf={name}={value}" for name, value in SMALL.items()]
    code = run(["pipeline", *words, "--master", "local[2]", "--driver-memory", "1g", *small])
    print(f"EXIT {code}", flush=True)
"""


def typed(folder: Path, *commands: list[str]) -> list[tuple[int, str]]:
    """Exit code and stdout of each command."""
    done = subprocess.run(
        [sys.executable, "-c", RUNNER],
        input=json.dumps(commands),
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("EXIT ")
    outputs = [parts[0], *(part.partition("\n")[2] for part in parts[1:])]
    codes = [int(part.partition("\n")[0]) for part in parts[1:]]
    return list(zip(codes, outputs, strict=False))


@pytest.fixture
def broken_history(tmp_path: Path) -> str:
    """A history in which a stale token was accepted, as a file."""
    events = a_stale_token_is_accepted(sound(1), Random(1)).events
    (tmp_path / "broken.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    return "broken.jsonl"


@pytest.mark.timeout(600)
async def test_from_a_queue_to_a_report_in_three_commands_and_on(
    tmp_path: Path, streams_url: str, broken_history: str
) -> None:
    await work(streams_url, 40, fail_every=10)
    events = len(await journal_of(streams_url))
    (tmp_path / "rows.csv").write_text("name,size\na,1\nb,2\n")
    captured, audited, reported, foreign, put, counted, unlike = typed(
        tmp_path,
        ["capture", "--once", streams_url],
        ["audit", "--json"],
        ["report"],
        ["audit", broken_history, "--quiesced"],
        ["enqueue", "--from", "rows.csv", "--task", "t", "--to", streams_url, "--json"],
        ["replay", "--where", "error_code = '503'", "--json"],
        ["replay", "--where", "error_code = 'nope'"],
    )
    assert captured == (0, f"{events:,} new events; lake holds {events:,}\n")
    assert audited[0] == 0
    assert json.loads(audited[1])["jobs"] == 40
    assert reported == (0, "report.html\n")
    assert "Throughput" in (tmp_path / "report.html").read_text()
    assert foreign[0] == 8
    assert "BROKEN" in foreign[1]
    assert put[0] == 0
    assert json.loads(put[1])["created"] == 2
    assert counted[0] == 0
    assert sum(json.loads(line)["count"] for line in counted[1].splitlines()) == 4
    assert unlike[0] == 3
