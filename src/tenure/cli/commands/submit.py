"""`tenure submit`: put a job into a queue, and wait for it if asked to."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import click
import msgspec

from tenure.cli.asking import Side, open_side, wait_for_end
from tenure.cli.config import load_config
from tenure.cli.exits import Exit, Failed
from tenure.cli.options import checked_timeout, gateway_option, json_option
from tenure.cli.output import emit, emit_text, note
from tenure.cli.views import error_text, event_line, event_object, is_success
from tenure.core.encoding import check_json
from tenure.core.errors import Conflict, InvalidJob, QueueFull
from tenure.core.job import JobEvent, NewJob, Submitted, new_job_id


@click.command("submit", short_help="Put a job into a queue.")
@click.argument("task")
@click.option(
    "-d", "--data", metavar="JSON|@FILE|-", default="{}", help="The payload; - reads stdin."
)
@click.option("--to", "--queue", "-q", "queue_url", metavar="URL", help="The queue.")
@gateway_option
@click.option("--wait", is_flag=True, help="Wait for the end and print the result.")
@click.option("--follow", is_flag=True, help="Print each event until the end.")
@click.option(
    "--timeout", "timeout_s", type=float, callback=checked_timeout, help="Seconds to wait."
)
@click.option("--idempotency-key", default="", help="The same key and payload give the same job.")
@click.option("--delay", "delay_s", type=click.FloatRange(min=0), default=0.0, help="Seconds.")
@click.option("--max-attempts", type=click.IntRange(min=1), help="Starts, the first one included.")
@click.option("--ttl", "ttl_s", type=click.IntRange(min=1), help="Seconds the job is kept.")
@json_option
def command(
    task: str,
    data: str,
    queue_url: str | None,
    gateway_url: str | None,
    wait: bool,
    follow: bool,
    timeout_s: float | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Put a job into a queue and print its id.

    With --wait, print its result instead; exit code 6 if it failed, 7 if it took too long.

    \b
    tenure submit greet -d '{"name": "Ada"}'
    tenure submit chat -d @prompt.json --follow
    generate | tenure submit report -d - --wait --timeout 60 --json
    """
    config = load_config()
    job = _job(task, _payload(data), **options)
    gateway = config.text("gateway_url", gateway_url) if queue_url is None else gateway_url or ""
    side = open_side(config.text("queue_url", queue_url), gateway, config.text("api_key"))
    if wait or follow:
        return asyncio.run(
            _submit_and_wait(side, job, follow=follow, timeout_s=timeout_s, as_json=as_json)
        )
    submitted = asyncio.run(_submit(side, job))
    if as_json:
        emit({"job_id": submitted.job_id, "status": submitted.status})
    else:
        emit_text(submitted.job_id)
    return Exit.OK


def _job(
    task: str,
    payload: bytes,
    *,
    idempotency_key: str,
    delay_s: float,
    max_attempts: int | None,
    ttl_s: int | None,
) -> NewJob:
    return NewJob(
        task=task,
        payload=payload,
        job_id=new_job_id(),
        idempotency_key=idempotency_key,
        delay_ms=round(delay_s * 1000),
        max_attempts=max_attempts,
        ttl_ms=None if ttl_s is None else ttl_s * 1000,
    )


def _payload(data: str) -> bytes:
    """The payload's bytes, checked to be JSON: a typo shall not reach a worker."""
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


async def _submit(side: Side, job: NewJob) -> Submitted:
    try:
        return _accepted(await side.submit(job))
    finally:
        await side.close()


async def _submit_and_wait(
    side: Side, job: NewJob, *, follow: bool, timeout_s: float | None, as_json: bool
) -> int:
    try:
        submitted = _accepted(await side.submit(job))
        note(f"job {submitted.job_id}")
        ended = await wait_for_end(side, submitted.job_id, timeout_s, _show(follow, as_json))
    finally:
        await side.close()
    return tell_end(ended, follow=follow, as_json=as_json)


def _show(follow: bool, as_json: bool) -> Any:
    def show(event: JobEvent) -> None:
        if follow and as_json:
            emit(event_object(event))
        elif follow:
            emit_text(event_line(event))

    return show


def tell_end(job: dict[str, Any], *, follow: bool, as_json: bool) -> int:
    """Print what a finished job left, unless its events have said it; 6 if it failed."""
    if not follow:
        emit(job if as_json else job.get("result"))
    if is_success(job["state"]):
        return Exit.OK
    reason = error_text(job.get("error")) or "no reason given"
    raise Failed(
        Exit.JOB_FAILED,
        f"job {job['job_id']} ended as {job['state']}: {reason}",
        job_id=job["job_id"],
        state=job["state"],
        error=job.get("error"),
    )


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
