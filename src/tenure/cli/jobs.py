"""The commands for single jobs: submit, watch, ls, inspect, cancel, retry and remove."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

import click
import msgspec

from tenure.cli.config import load_config
from tenure.cli.console import (
    Exit,
    Failed,
    ago,
    answer,
    answer_rows,
    emit,
    emit_text,
    job_object,
    json_option,
    note,
    paint,
    paint_state,
    plain_json,
    queue_option,
    with_ledger,
)
from tenure.core.encoding import check_json, one_line
from tenure.core.errors import (
    Conflict,
    InvalidJob,
    NotFound,
    QueueFull,
)
from tenure.core.job import JobEvent, JobRecord, NewJob, Submitted, new_job_id
from tenure.core.portable import STATES, is_in, known_words, own_words
from tenure.core.registry import parse_url
from tenure.core.seam import Ledger, Query

if TYPE_CHECKING:
    from tenure.cli.gateway_client import GatewayClient

_DONE = {"ok", "requested"}  # "requested": the worker that runs the job ends it


def _checked_timeout(_ctx: click.Context, _param: click.Parameter, value: float | None) -> Any:
    if value is not None and value <= 0:
        raise click.BadParameter("a timeout is more than 0 seconds")
    return value


_gateway_option = click.option(
    "--gateway", "gateway_url", metavar="URL", help="Ask this gateway instead of the store."
)
_timeout_option = click.option(
    "--timeout", "timeout_s", type=float, callback=_checked_timeout, help="Seconds to wait."
)
_ids_argument = click.argument("job_ids", metavar="ID...", nargs=-1, required=True)


@click.command("submit")
@click.argument("task")
@click.option(
    "-d", "--data", metavar="JSON|@FILE|-", default="{}", help="The payload; - reads stdin."
)
@queue_option
@_gateway_option
@click.option("--wait", is_flag=True, help="Wait for the end and print the result.")
@click.option("--follow", is_flag=True, help="Print each event until the end.")
@_timeout_option
@click.option("--idempotency-key", default="", help="The same key and payload give the same job.")
@click.option("--delay", "delay_s", type=click.FloatRange(min=0), default=0.0, help="Seconds.")
@click.option("--max-attempts", type=click.IntRange(min=1), help="Starts, the first one included.")
@click.option("--ttl", "ttl_s", type=click.IntRange(min=1), help="Seconds the job is kept.")
@json_option
def submit_command(
    task: str,
    data: str,
    queue_url: str | None,
    gateway_url: str | None,
    wait: bool,
    follow: bool,
    timeout_s: float | None,
    idempotency_key: str,
    delay_s: float,
    max_attempts: int | None,
    ttl_s: int | None,
    as_json: bool,
) -> int:
    """Put a job into a queue and print its id.

    With --wait, print its result instead; exit code 6 if it failed, 7 if it took too long.

    \b
    tenure submit greet -d '{"name": "Ada"}'
    tenure submit chat -d @prompt.json --follow
    generate | tenure submit report -d - --wait --timeout 60 --json
    """
    job = NewJob(
        task=task,
        payload=_payload(data),
        job_id=new_job_id(),
        idempotency_key=idempotency_key,
        delay_ms=round(delay_s * 1000),
        max_attempts=max_attempts,
        ttl_ms=None if ttl_s is None else ttl_s * 1000,
    )
    client = _open_client(queue_url, gateway_url)
    if wait or follow:
        show = _event_printer(as_json) if follow else _show_nothing
        ended = asyncio.run(_submit_and_wait(client, job, timeout_s, show))
        if not follow:
            emit(ended if as_json else ended.get("result"))
        return _checked_end(ended)
    submitted = asyncio.run(_submit(client, job))
    answer(as_json, {"job_id": submitted.job_id, "status": submitted.status}, submitted.job_id)
    return Exit.OK


def _payload(data: str) -> bytes:
    """The payload's bytes, checked to be JSON, so that no typo reaches a worker."""
    raw, where = data.encode(), "--data"
    if data == "-":
        raw, where = sys.stdin.buffer.read(), "stdin"
    elif data.startswith("@"):
        where = data[1:]
        try:
            raw = Path(where).read_bytes()
        except OSError as error:
            raise click.BadParameter(f"{where} cannot be read: {error.strerror}") from None
    try:
        check_json(raw)
        return msgspec.json.encode(msgspec.Raw(msgspec.json.format(raw, indent=-1)))
    except ValueError as error:
        raise click.BadParameter(
            f'{where} {error}; a payload looks like \'{{"prompt": "hello"}}\''
        ) from None


class _StoreClient:
    """Submits and follows jobs directly in the store."""

    def __init__(self, url: str) -> None:
        from tenure.client.connection import Connection

        self._connection = Connection(url)

    async def submit(self, job: NewJob) -> Submitted:
        (submitted,) = await self._connection.queue.submit([job])
        return submitted

    async def follow(self, job_id: str) -> AsyncIterator[JobEvent]:
        from tenure.client.follow import EventFollower
        from tenure.worker.telemetry import ensure_logs

        ensure_logs()
        await self.job(job_id)  # raises if there is none, or no store
        feed = self._connection.feed
        follower = feed.follow(EventFollower(feed, job_id, ""))
        try:
            while (event := await follower.next()) is not None:
                yield event
        finally:
            feed.leave(follower)

    async def job(self, job_id: str) -> dict[str, Any]:
        record = await self._connection.ledger.get(job_id)
        if record is None:
            raise NotFound(
                f"there is no job {job_id} (any more); `tenure ls` lists those there are"
            )
        return job_object(record)

    async def close(self) -> None:
        await self._connection.close()


Client = Union[_StoreClient, "GatewayClient"]


def _open_client(queue_url: str | None, gateway_url: str | None) -> Client:
    """A client of the gateway if there is one and no queue is given, else of the store."""
    config = load_config()
    gateway = config.text("gateway_url", gateway_url) if queue_url is None else gateway_url
    if gateway:
        from tenure.cli.gateway_client import GatewayClient

        return GatewayClient(gateway, config.text("api_key"))
    return _StoreClient(config.text("queue_url", queue_url))


async def _submit(client: Client, job: NewJob) -> Submitted:
    try:
        return _accepted(await client.submit(job))
    finally:
        await client.close()


async def _submit_and_wait(
    client: Client, job: NewJob, timeout_s: float | None, show: Callable[[JobEvent], None]
) -> dict[str, Any]:
    try:
        submitted = _accepted(await client.submit(job))
        note(f"job {submitted.job_id}")
        return await _wait_for_end(client, submitted.job_id, timeout_s, show)
    finally:
        await client.close()


def _accepted(submitted: Submitted) -> Submitted:
    match submitted.status:
        case "created":
            return submitted
        case "replayed":
            note("this key was used before with the same payload: it is the job from then")
            return submitted
        case "conflict":
            raise Conflict(submitted.reason or "the idempotency key belongs to another payload")
        case "full":
            wait_s = submitted.retry_after_ms / 1000
            raise QueueFull(
                f"{submitted.reason or 'the queue is full'}; try again in {wait_s:g} s",
                retry_after_ms=submitted.retry_after_ms,
            )
        case "invalid":
            raise InvalidJob(submitted.reason or "the queue does not take such a job")


async def _wait_for_end(
    client: Client, job_id: str, timeout_s: float | None, show: Callable[[JobEvent], None]
) -> dict[str, Any]:
    """Show each event of a job until it ends; returns the job, or raises with exit code 7."""
    try:
        async with asyncio.timeout(timeout_s):
            async for event in client.follow(job_id):
                show(event)
            return await client.job(job_id)
    except TimeoutError:
        raise Failed(
            Exit.TIMEOUT,
            f"job {job_id} had not ended after {timeout_s:g} s; `tenure watch {job_id}` goes on",
            job_id=job_id,
        ) from None


def _event_printer(as_json: bool) -> Callable[[JobEvent], None]:
    if as_json:
        return lambda event: emit(_event_object(event))
    return lambda event: emit_text(event_line(event))


def _show_nothing(event: JobEvent) -> None:
    return None


def _checked_end(job: dict[str, Any]) -> int:
    if job["state"] == "done":
        return Exit.OK
    reason = _error_text(job.get("error")) or "no reason given"
    raise Failed(
        Exit.JOB_FAILED,
        f"job {job['job_id']} ended as {job['state']}: {reason}",
        job_id=job["job_id"],
        state=job["state"],
        own_state=job["own_state"],
        error=job.get("error"),
    )


def _error_text(error: Any) -> str:
    if isinstance(error, dict):
        for key in ("message", "detail", "reason"):
            if error.get(key):
                return str(error[key])
    return "" if error is None else str(error)


@click.command("watch")
@click.argument("job_id", metavar="ID")
@queue_option
@_gateway_option
@_timeout_option
@json_option
def watch_command(
    job_id: str,
    queue_url: str | None,
    gateway_url: str | None,
    timeout_s: float | None,
    as_json: bool,
) -> int:
    """Print a job's events from the first to the last; exit code 6 if the job failed.

    \b
    tenure watch JOB_ID
    tenure watch JOB_ID --json | grep '"progress"'
    """
    client = _open_client(queue_url, gateway_url)

    async def watch() -> dict[str, Any]:
        try:
            return await _wait_for_end(client, job_id, timeout_s, _event_printer(as_json))
        finally:
            await client.close()

    ended = asyncio.run(watch())
    return Exit.OK if ended["state"] == "done" else Exit.JOB_FAILED


def _event_object(event: JobEvent) -> dict[str, Any]:
    """The event for `--json`."""
    return {
        "id": event.event_id,
        "type": event.type,
        "ts_ms": event.ts_ms,
        "step": event.step,
        "data": plain_json(event.data),
    }


def event_line(event: JobEvent) -> str:
    """The event as a line: time, type, step, and data if there is any."""
    when = f"{event.ts_ms // 1000 % 86_400 // 3600:02d}:{event.ts_ms // 60_000 % 60:02d}:"
    when += f"{event.ts_ms // 1000 % 60:02d}.{event.ts_ms % 1000:03d}"
    data = "" if event.data in (b"", b"{}", b"null") else event.data.decode(errors="replace")
    parts = [paint(when, "dim"), paint_state(event.type).ljust(10), event.step, data]
    return "  ".join(one_line(part) for part in parts if part)


@click.command("ls")
@click.option(
    "--state", "states", multiple=True,
    help=f"{', '.join(STATES)}, or the contract's own word; repeatable.",
)  # fmt: skip
@click.option("--task", default="", help="Only this task.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True)
@click.option("--after", default="", metavar="CURSOR", help="Go on where the last page ended.")
@queue_option
@json_option
def ls_command(
    states: tuple[str, ...],
    task: str,
    limit: int,
    after: str,
    queue_url: str | None,
    as_json: bool,
) -> None:
    """List jobs, newest first; with --json one object a line.

    \b
    tenure ls --state failed --limit 20
    tenure ls --queue 'bullmq+redis://127.0.0.1:6379/0?queue=mail' --task chat --json
    """
    url = parse_url(load_config().text("queue_url", queue_url))
    words = _words(url.contract, states) if states else ()
    query = Query(states=words, task=task, limit=limit, after=after)
    page = with_ledger(url.text, lambda ledger: ledger.find(query))
    jobs = [job_object(each) for each in page.jobs if not states or is_in(each, states)]
    none = "no jobs" + (" like that" if states or task or after else " yet")
    answer_rows(as_json, jobs, ["ID", "TASK", "STATE", "ATTEMPT", "AGE", "ERROR"], _job_row, none)
    if page.after:
        note(f"more: --after {page.after}")


def _words(contract: str, states: Sequence[str]) -> tuple[str, ...]:
    """The contract's words to ask for; it refuses one that it does not have."""
    own = [state for state in states if state not in STATES]
    return own_words(contract, states, (*known_words(contract), *own))


def _job_row(job: dict[str, Any]) -> list[str]:
    error = job.get("error")
    message = error.get("message", "") if isinstance(error, dict) else ""
    return [
        job["job_id"],
        job["task"],
        paint_state(job["state"], job["own_state"]),
        str(job.get("attempt") or "-"),
        ago(job.get("updated_ms") or job.get("created_ms") or 0),
        message[:60],
    ]


@click.command("inspect")
@click.argument("job_id", metavar="ID")
@queue_option
@json_option
def inspect_command(job_id: str, queue_url: str | None, as_json: bool) -> None:
    """Show one job: its state, what went in, what came out, and its events.

    \b
    tenure inspect JOB_ID
    tenure inspect JOB_ID --json
    """

    async def ask(ledger: Ledger) -> tuple[JobRecord | None, list[JobEvent]]:
        return await ledger.get(job_id), await ledger.events(job_id)

    record, events = with_ledger(queue_url, ask)
    if record is None:
        raise NotFound(f"there is no job {job_id} (any more); `tenure ls` lists those there are")
    job = job_object(record)
    lines = [*_job_lines(job), *(f"  {event_line(event)}" for event in events)]
    found = job | {"events": [_event_object(event) for event in events]}
    answer(as_json, found, "\n".join(lines))


def _job_lines(job: dict[str, Any]) -> list[str]:
    rows = [
        ("job", job["job_id"]),
        ("queue", f"{job['contract']} {job['queue']}"),
        ("task", job["task"]),
        ("state", paint_state(job["state"], job["own_state"])),
        ("attempt", f"{job['attempt']} of {job['max_attempts'] or 'any number'}"),
        ("worker", job["worker_id"]),
        ("created", f"{ago(job['created_ms'])} ago"),
        ("updated", f"{ago(job['updated_ms'])} ago"),
    ]
    for name in ("payload", "progress", "result", "error"):
        value = job[name]
        rows.append((name, "" if value is None else msgspec.json.encode(value).decode()))
    return [f"{paint(name.ljust(9), 'dim')} {one_line(value)}" for name, value in rows if value]


@click.command("cancel")
@_ids_argument
@queue_option
@json_option
def cancel_command(job_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> int:
    """End waiting jobs at once and running ones through their worker.

    \b
    tenure cancel JOB_ID
    tenure cancel ID ID ID --json
    """
    return _act(queue_url, job_ids, lambda ledger, ids: ledger.cancel(ids), "canceled", as_json)


@click.command("retry")
@_ids_argument
@queue_option
@json_option
def retry_command(job_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> int:
    """Send finished jobs back to their queue; a job that has not ended is a conflict.

    \b
    tenure retry JOB_ID
    """
    return _act(queue_url, job_ids, lambda ledger, ids: ledger.retry(ids), "queued again", as_json)


@click.command("remove")
@_ids_argument
@queue_option
@json_option
def remove_command(job_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> int:
    """Delete jobs that are not running, with their events and results.

    \b
    tenure remove JOB_ID
    """
    return _act(queue_url, job_ids, lambda ledger, ids: ledger.remove(ids), "removed", as_json)


def _act(
    queue_url: str | None,
    job_ids: Sequence[str],
    act: Callable[[Ledger, Sequence[str]], Awaitable[list[str]]],
    done: str,
    as_json: bool,
) -> int:
    """Act on jobs by id and print one line per job; the worst answer is the exit code."""
    answers = with_ledger(queue_url, lambda ledger: act(ledger, job_ids))
    worst = Exit.OK
    for job_id, answered in zip(job_ids, answers, strict=True):
        is_done = answered in _DONE
        if not is_done:
            worst = max(worst, Exit.NOT_FOUND if answered == "missing" else Exit.CONFLICT)
        if as_json:
            emit({"job_id": job_id, "ok": is_done, "answer": answered})
        elif is_done:
            emit_text(f"{job_id} {done if answered == 'ok' else 'told to its worker'}")
        else:
            note(f"tenure: {job_id}: {_why_not(answered)}")
    return int(worst)


def _why_not(answer: str) -> str:
    """A ledger answers "missing", the state that forbids the action, or a sentence."""
    if answer == "missing":
        return "there is no such job (any more)"
    return answer if " " in answer else f"not possible, the job is {answer}"
