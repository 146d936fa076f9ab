"""Workers in other languages, from examples/: HTTP and JSON are all they need."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tenure.store.embedded.programs import locate_node
from tests.contract.plane.conftest import Site, claim, enqueue, proof, verb
from tests.waiting import until

EXAMPLES = Path(__file__).parents[3] / "examples"
LINES_MAX = 60
GREET = """sed 's|.*"name": *"\\([^"]*\\)".*|{"greeting":"Hello, \\1!"}|'"""


@asynccontextmanager
async def running(*argv: str | Path, **environment: str) -> AsyncIterator[None]:
    """A worker that runs within the block."""
    process = await asyncio.create_subprocess_exec(
        *map(str, argv), env={**os.environ, **environment}, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def argv_of(language: str, url: str, command: str = GREET) -> list[str]:
    if language == "node":
        return [str(locate_node()), str(EXAMPLES / "plane_worker.mjs"), url, "jobs"]
    return ["bash", str(EXAMPLES / "plane_worker.sh"), url, "jobs", "bash", "-c", command]


@pytest.mark.clause("P-24")
@pytest.mark.parametrize("language", ["bash", "node"])
async def test_a_worker_in_another_language_does_the_job(site: Site, language: str) -> None:
    _, key = await site.ring.create(["jobs:work", "stream:jobs"], language)
    _, admin = await site.ring.create(["admin"], "producer")
    web = await site.web(retry_delay_ms=1)
    web.headers["x-api-key"] = admin
    ids = [await enqueue(web, task="greet", payload={"name": f"Ada {n}"}) for n in range(5)]
    async with running(*argv_of(language, web.url), TENURE_KEY=key):
        ledger = site.ledger()

        async def all_done() -> bool:
            return (await ledger.counts()).states["SUCCEEDED"] == 5

        await until(all_done, within_s=30)
    for n, job_id in enumerate(ids):
        stored = (await web.get(f"/v1/plane/jobs/{job_id}")).json
        assert stored["result"] == {"greeting": f"Hello, Ada {n}!"}
        assert stored["worker_id"].startswith(language)


@pytest.mark.clause("P-24", "P-13")
@pytest.mark.parametrize("language", ["bash", "node"])
async def test_a_failure_in_another_language_is_kept_and_retried(site: Site, language: str) -> None:
    web = await site.web(retry_delay_ms=1)
    job_id = await enqueue(web, task="fail", max_attempts=2)
    command = """echo 'it "broke"' >&2; exit 7"""
    async with running(*argv_of(language, web.url, command)):

        async def is_dead() -> bool:
            return (await web.get(f"/v1/plane/jobs/{job_id}")).json["status"] == "DLQ"

        await until(is_dead, within_s=30)
    stored = (await web.get(f"/v1/plane/jobs/{job_id}")).json
    assert "broke" in stored["error"]["message"]
    assert len(stored["attempts"]) == 2


@pytest.mark.clause("P-24", "P-11")
async def test_the_bash_worker_keeps_its_lease_while_its_command_runs(site: Site) -> None:
    web = await site.web(lease_ms=900, upkeep_ms=100)
    job_id = await enqueue(web, max_attempts=1)
    async with running(*argv_of("bash", web.url, "sleep 3; echo 1")):

        async def is_over() -> bool:
            return (await web.get(f"/v1/plane/jobs/{job_id}")).json["status"] in (
                "DLQ",
                "SUCCEEDED",
            )

        await until(is_over, within_s=30)
    assert (await web.get(f"/v1/plane/jobs/{job_id}")).json["status"] == "SUCCEEDED"


@pytest.mark.clause("P-24")
async def test_a_job_that_a_killed_worker_held_goes_to_another_language(site: Site) -> None:
    web = await site.web(lease_ms=500, upkeep_ms=100)
    job_id = await enqueue(web, task="greet", payload={"name": "Ada"}, max_attempts=3)
    held = await claim(web)
    async with running(*argv_of("node", web.url)):

        async def is_done() -> bool:
            return (await web.get(f"/v1/plane/jobs/{job_id}")).json["status"] == "SUCCEEDED"

        await until(is_done, within_s=30)
    late = await verb(web, "complete", **proof(held), result="late")
    assert (late["ok"], late["ack"]) == (False, True)


@pytest.mark.parametrize("name", ["plane_worker.sh", "plane_worker.mjs"])
def test_a_worker_in_another_language_is_short(name: str) -> None:
    assert len((EXAMPLES / name).read_text().splitlines()) <= LINES_MAX
