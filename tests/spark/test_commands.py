"""The commands of docs/howto/pipeline.md, all of them, as a user types them in their order.

From a running `tenure up` to a report in three commands; then everything else that the page
shows, in the same folder, and a few that go wrong.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tenure.core.registry import open_ledger
from tests.chaos.sim.test_verdict import a_stale_token_is_accepted, sound
from tests.contract.cli.conftest import Program
from tests.contract.cli.pages import page
from tests.contract.store.test_private import open_to_others
from tests.spark.connecting import free_port
from tests.spark.typing_commands import typed
from tests.spark.working import as_rows, journal_of, work

PAGE = page("docs/howto/pipeline.md")
APP = """
from tenure import task

@task("embed")
async def embed(job):
    return len(job.payload["text"])
"""
BEFORE = """
from tenure.pipeline import SparkSettings, open_session
from tests.spark.working import SMALL
spark = open_session(SparkSettings(master="local[2]", driver_memory="1g", quick=True, conf=SMALL))
rows = spark.createDataFrame([("c9",)], "clip_id string")
url = {url!r}
"""
AFTER = "print(events.count(), jobs.count(), live.isStreaming)"


def commands() -> list[list[str]]:
    """The commands of the pipeline that the page shows."""
    shown = [block.text for block in PAGE.blocks if block.language == "sh"]
    lines = [shlex.split(line, comments=True) for line in "".join(shown).splitlines() if line]
    return [line[2:] for line in lines if line[:2] == ["tenure", "pipeline"]]


def meant(words: list[str], streams_url: str, bullmq_url: str) -> list[str]:
    """With the queues of this test; what would follow for ever takes what is there."""
    urls = {
        "URL": streams_url,
        "streams+redis://host:6379/0": streams_url,
        "bullmq+redis://host:6379/0?queue=video": bullmq_url,
    }
    once = ["--once"] if words[0] == "capture" and "--once" not in words else []
    return [urls.get(word, word) for word in words] + once


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Program]:
    """`tenure up` in this folder, with what it runs as samples."""
    program = Program(["up", "--port", str(free_port()), "--no-node"], tmp_path, {})
    try:
        program.heard("tenure is up")
        yield program
    finally:
        program.kill()


@pytest.fixture
def broken_history(tmp_path: Path) -> str:
    """A history in which a stale token was accepted, as a file."""
    events = a_stale_token_is_accepted(sound(1), Random(1)).events
    (tmp_path / "broken.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(events))
    return "broken.jsonl"


@pytest.fixture
async def files(tmp_path: Path, streams_url: str, bullmq_url: str) -> None:
    """What the page takes for granted: queues with a history, clips, a corpus, an app."""
    for url in (streams_url, bullmq_url):
        await work(url, 20, fail_every=10)
    history = pa.Table.from_pylist(as_rows(await journal_of(streams_url)))
    pq.write_table(history, tmp_path / "history.parquet")
    pq.write_table(pa.table({"clip_id": ["c1", "c2"], "size": [1, 2]}), tmp_path / "clips.parquet")
    pq.write_table(pa.table({"id": ["a"], "text": ["fox"]}), tmp_path / "corpus.parquet")
    (tmp_path / "app.py").write_text(APP)


@pytest.mark.timeout(900)
@pytest.mark.usefixtures("up", "files")
@pytest.mark.runs("docs/howto/pipeline.md:sh", "docs/howto/pipeline.md:python")
async def test_every_command_and_program_of_the_page_does_what_it_says(
    tmp_path: Path, streams_url: str, bullmq_url: str, broken_history: str
) -> None:
    shown = [meant(words, streams_url, bullmq_url) for words in commands()]
    assert [words[0] for words in shown[:3]] == ["capture", "audit", "report"]
    programs = [block.text for block in PAGE.blocks if block.language == "python"]
    _, catalog, reading, mapping, plain = programs
    said = typed(
        tmp_path,
        *shown,
        ["audit", broken_history, "--quiesced", "--json"],
        ["replay", "--where", "error_code = 'nope'"],
        BEFORE.format(url=streams_url) + reading + AFTER,
        mapping,
        catalog,
        plain,
        ["audit", "plain"],
        umask=0,
    )
    codes = [code for code, _ in said]
    assert codes == [0] * len(shown) + [8, 3, 0, 0, 0, 0, 0]
    told = {" ".join(words): output for words, (_, output) in zip(shown, said, strict=False)}
    assert re.match(r"[\d,]+ new events; lake holds", told["capture --once"])
    assert "Throughput" in (tmp_path / "report.html").read_text()
    assert "2 new, 0 were there" in _of(told, "enqueue", "--key clip_id")
    assert "4 run again" in _of(told, "replay", "--yes")
    assert json.loads(said[-7][1])["violations_shown"], "evidence for a program"
    assert said[-5][1].split()[1:] == ["23", "True"], "20 jobs, two clips, and one of the program"
    assert pq.read_table(tmp_path / "vectors.parquet").to_pylist()[0]["result"] == "3"
    await still_there(streams_url, {"render": 3})
    tables_are_read_by_others(tmp_path)
    lake_is_private(tmp_path / "lake")


def _of(told: dict[str, str], command: str, ending: str) -> str:
    return next(out for words, out in told.items() if words.startswith(command) and
                words.endswith(ending))  # fmt: skip


async def still_there(url: str, tasks: dict[str, int]) -> None:
    """So many jobs of these tasks are in the queue."""
    from tenure.core.seam import Query

    ledger = open_ledger(url)
    try:
        jobs = (await ledger.find(Query(limit=500))).jobs
    finally:
        await ledger.close()
    assert {task: sum(job.task == task for job in jobs) for task in tasks} == tasks


def tables_are_read_by_others(folder: Path) -> None:
    """The page's first program: by DuckDB, without Spark."""
    program, *_ = [block.text for block in PAGE.blocks if block.language == "python"]
    made: dict[str, list[tuple[object, ...]]] = {}
    exec(program.replace('"lake/', f'"{folder}/lake/'), made)  # a page of ours
    assert {"submit", "claim"} <= {row[0] for row in made["kinds"]}
    assert made["failed"]


def lake_is_private(lake: Path) -> None:
    """What Python has written into it, and what Java has, whatever the umask was."""
    assert lake.stat().st_mode & 0o777 == 0o700
    assert len(list(lake.rglob("*.parquet"))) > 1
    assert open_to_others(lake) == []
