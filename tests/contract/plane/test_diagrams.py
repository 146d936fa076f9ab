"""The sequence diagrams of docs/contracts/plane.md are what really happens.

Each scenario is played over real HTTP and drawn from the answers; the page must hold that drawing.
`python -m pytest tests/contract/plane/test_diagrams.py --draw` writes them into the page anew.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract.gateway.web import Web
from tests.contract.plane.conftest import Site, enqueue, proof, verb

PAGE = Path(__file__).parents[3] / "docs" / "contracts" / "plane.md"
SHOWN = ("claimed", "attempt", "ok", "ack", "requeued", "dlq")
ERROR = {"code": "E1", "message": "it broke", "retryable": True}


class Drawing:
    """What was said between workers and planes, line by line."""

    def __init__(self, web: Web) -> None:
        self.web = web
        self.lines = ["sequenceDiagram"]
        self.job_id = ""

    async def enqueued(self, **fields: Any) -> None:
        self.job_id = await enqueue(self.web, **fields)
        self.lines += ["  producer->>plane: POST /v1/plane/jobs", "  plane-->>producer: 202"]
        await self.note()

    async def said(self, worker: str, name: str, *, lost: bool = False, **fields: Any) -> Any:
        """A call and its answer; of one that got lost the plane knows more than the worker."""
        answer = await verb(self.web, name, **({"worker_id": worker} | fields))
        said = fields.get("claim_id") or fields.get("result") or ""
        self.lines.append(f"  {worker}->>plane: {name}{f' {said}' if said else ''}")
        shown = ", ".join(
            f"{key} {str(answer[key]).lower()}"
            for key in SHOWN
            if key in answer and _tells(answer, key)
        )
        self.lines.append(f"  plane--{'x' if lost else '>>'}{worker}: {shown}")
        await self.note()
        return answer

    async def note(self, what: str = "") -> None:
        stored = (await self.web.get(f"/v1/plane/jobs/{self.job_id}")).json
        state = f"{stored['status']}, attempt {stored['attempt']}"
        line = f"  Note over plane: {what or state}"
        if line not in self.lines[-3:]:
            self.lines.append(line)


def _tells(answer: Any, key: str) -> bool:
    """`requeued` and `dlq` are told by a fail alone."""
    return key not in ("requeued", "dlq") or answer.get("verdict") in ("retried", "buried")


async def a_job(drawing: Drawing) -> None:
    await drawing.enqueued()
    lease = await drawing.said("worker", "claim", max_wait_ms=1_000)
    held = {key: lease[key] for key in ("job_id", "lease_token")}
    await drawing.said("worker", "heartbeat", **held)
    await drawing.said("worker", "complete", **proof(lease), result="result")


async def lost_answers(drawing: Drawing) -> None:
    await drawing.enqueued()
    await drawing.said("worker", "claim", claim_id="c1", lost=True)
    lease = await drawing.said("worker", "claim", claim_id="c1")
    await drawing.said("worker", "complete", **proof(lease), result="result", lost=True)
    await drawing.said("worker", "complete", **proof(lease), result="result")


async def a_late_call(drawing: Drawing) -> None:
    await drawing.enqueued()
    late = await drawing.said("first", "claim")
    await asyncio.sleep(0.15)  # the lease runs out by time alone
    await verb(drawing.web, "upkeep")
    await drawing.note("the lease of first ran out")
    await drawing.note()
    lease = await drawing.said("second", "claim")
    await drawing.said("first", "complete", **proof(late), result="late")
    await drawing.said("second", "complete", **proof(lease), result="result")


async def failures(drawing: Drawing) -> None:
    await drawing.enqueued(max_attempts=2)
    for _ in range(2):
        lease = await drawing.said("worker", "claim", max_wait_ms=2_000)
        await drawing.said("worker", "fail", **proof(lease), error=ERROR)


SCENARIOS: dict[str, Callable[[Drawing], Awaitable[None]]] = {
    "a-job": a_job,
    "lost-answers": lost_answers,
    "a-late-call": a_late_call,
    "failures": failures,
}


@pytest.mark.clause("P-7", "P-12", "P-13", "P-15", "P-16")
@pytest.mark.parametrize("name", SCENARIOS)
async def test_the_page_shows_what_happens(
    site: Site, name: str, request: pytest.FixtureRequest
) -> None:
    lease_ms = 100 if name == "a-late-call" else 60_000
    drawing = Drawing(await site.web(lease_ms=lease_ms, retry_delay_ms=1))
    await SCENARIOS[name](drawing)
    block = "```mermaid\n" + "\n".join(drawing.lines) + "\n```\n"
    frame = re.compile(rf"(<!-- drawn: {name} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    page = PAGE.read_text()
    shown = frame.search(page)
    assert shown, f"{PAGE.name} has no place for {name}"
    if request.config.getoption("--draw"):
        PAGE.write_text(frame.sub(lambda match: match[1] + block + match[3], page))
        return
    assert shown[2] == block, f"{PAGE.name} is out of date: run the test with --draw"
