"""Options that several commands share, and the small steps round every command that reads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tenure.cli.config import load_config
from tenure.cli.exits import Exit
from tenure.cli.output import emit, emit_text, note

if TYPE_CHECKING:
    from tenure.core.seam import Ledger

Answer = TypeVar("Answer")

json_option = click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
queue_option = click.option(
    "--queue", "-q", "queue_url", metavar="URL", help="The queue; default: TENURE_QUEUE_URL."
)
gateway_option = click.option(
    "--gateway", "gateway_url", metavar="URL", help="Ask this gateway instead of the store."
)
ids_argument = click.argument("job_ids", metavar="ID...", nargs=-1, required=True)


def with_ledger(queue_url: str | None, ask: Callable[[Ledger], Awaitable[Answer]]) -> Answer:
    """Open the configured queue's ledger, ask it, and let go of it."""
    import asyncio  # here, so that commands which ask nobody start faster

    from tenure.core.registry import open_ledger

    async def asked() -> Answer:
        ledger = open_ledger(load_config().text("queue_url", queue_url))
        try:
            return await ask(ledger)
        finally:
            await ledger.close()

    return asyncio.run(asked())


_DONE = {"ok", "requested"}  # "requested": the worker that runs the job has been told


def steer(
    queue_url: str | None,
    job_ids: Sequence[str],
    act: Callable[[Ledger, Sequence[str]], Awaitable[list[str]]],
    *,
    done: str,
    as_json: bool,
) -> int:
    """Do something to jobs by id and say per job how it went; the worst answer is the exit code."""
    answers = with_ledger(queue_url, lambda ledger: act(ledger, job_ids))
    worst = Exit.OK
    for job_id, answer in zip(job_ids, answers, strict=True):
        is_done = answer in _DONE
        if not is_done:
            worst = max(worst, Exit.NOT_FOUND if answer == "missing" else Exit.CONFLICT)
        if as_json:
            emit({"job_id": job_id, "ok": is_done, "answer": answer})
        elif is_done:
            emit_text(f"{job_id} {done if answer == 'ok' else 'told to its worker'}")
        else:
            note(f"tenure: {job_id}: {_why_not(answer)}")
    return int(worst)


def _why_not(answer: str) -> str:
    """A ledger answers "missing", the state that forbids the step, or a sentence."""
    if answer == "missing":
        return "there is no such job (any more)"
    return answer if " " in answer else f"not possible, the job is {answer}"


def checked_timeout(_ctx: click.Context, _param: click.Parameter, value: float | None) -> Any:
    """A timeout is a positive number of seconds."""
    if value is not None and value <= 0:
        raise click.BadParameter("a timeout is more than 0 seconds")
    return value
