"""The commands for whole queues: queues, pause, resume, schedules and outbox."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from tenure.cli.config import load_config, with_options
from tenure.cli.console import (
    ago,
    answer,
    answer_rows,
    json_option,
    paint,
    queue_option,
    queues_option,
    safe_url,
    table,
    with_ledger,
)
from tenure.core.encoding import TIME_MS_MAX, shown_json
from tenure.core.errors import NotFound, UsageError
from tenure.core.job import JobRecord, Schedule
from tenure.core.portable import portable_counts, word_state
from tenure.core.registry import has_part, parse_url, unique_names
from tenure.core.seam import Ledger, Query, Schedules


@click.command("queues")
@queues_option
@json_option
def queues_command(queue_urls: tuple[str, ...], as_json: bool) -> None:
    """Show depth, totals, workers and the oldest waiting job of each queue.

    \b
    tenure queues
    tenure queues --queue 'inbox+sqlite:///jobs.db' --json
    """
    urls = load_config().queue_urls(queue_urls)
    names = unique_names([parse_url(url).name for url in urls])
    found = [with_ledger(url, lambda ledger: ledger.counts()) for url in urls]
    for name, url, counts in zip(names, urls, found, strict=True):
        view: dict[str, Any] = {"queue": name, "url": safe_url(url)}
        view |= msgspec.to_builtins(counts)
        contract = parse_url(url).contract
        view |= {"states": portable_counts(contract, counts.states), "own_states": counts.states}
        answer(as_json, view, _queue_text(view))


def _queue_text(view: dict[str, Any]) -> str:
    facts = [f"{view['workers']} worker{'s' * (view['workers'] != 1)}"] + (
        ["paused"] if view["paused"] else []
    )
    if view["oldest_waiting_ms"]:
        facts.append(f"oldest waits {view['oldest_waiting_ms'] / 1000:.1f} s")
    own, totals, contract = view["own_states"], view["totals"], parse_url(view["url"]).contract
    rows = [
        [word_state(contract, word) or "", word, *(str(n.get(word, "-")) for n in (own, totals))]
        for word in dict.fromkeys([*own, *totals])
    ]
    head = f"{paint(view['queue'], 'bold')}  {view['url']}"
    return "\n".join([head, ", ".join(facts), table(["STATE", "ITS WORD", "NOW", "EVER"], rows)])


@click.command("pause")
@queue_option
@json_option
def pause_command(queue_url: str | None, as_json: bool) -> None:
    """Stop handing out jobs; running jobs continue.

    \b
    tenure pause --queue 'bullmq+redis://127.0.0.1:6379/0?queue=mail'
    """
    with_ledger(queue_url, lambda ledger: ledger.pause())
    queue = parse_url(load_config().text("queue_url", queue_url)).name
    answer(as_json, {"queue": queue, "paused": True}, f"{queue} paused")


@click.command("resume")
@queue_option
@json_option
def resume_command(queue_url: str | None, as_json: bool) -> None:
    """Hand out jobs again.

    \b
    tenure resume --queue 'bullmq+redis://127.0.0.1:6379/0?queue=mail'
    """
    with_ledger(queue_url, lambda ledger: ledger.resume())
    queue = parse_url(load_config().text("queue_url", queue_url)).name
    answer(as_json, {"queue": queue, "paused": False}, f"{queue} resumed")


@click.command("schedules")
@click.option("--remove", "remove", metavar="NAME", help="Remove this schedule.")
@queue_option
@json_option
def schedules_command(remove: str | None, queue_url: str | None, as_json: bool) -> None:
    """Show the schedules of a queue, the next one due first, or remove one.

    \b
    tenure schedules --queue 'streams+redis://127.0.0.1:6379/0'
    tenure schedules --remove report --json
    """
    if remove is None:
        found = with_ledger(queue_url, lambda ledger: _schedules_of(ledger).list())
        headers = ["SCHEDULE", "TASK", "TIMES", "NEXT", "MISSED", "LAST JOB", "ERROR"]
        objects = [_schedule_object(each) for each in found]
        answer_rows(as_json, objects, headers, _schedule_row, "no schedules")
        return
    if not with_ledger(queue_url, lambda ledger: _schedules_of(ledger).remove(remove)):
        raise NotFound(f"there is no schedule {remove!r}; `tenure schedules` lists those there are")
    answer(as_json, {"schedule": remove, "removed": True}, f"{remove} removed")


def _schedules_of(ledger: Ledger) -> Schedules:
    found = ledger.features.schedules
    if found is None:
        raise UsageError("this queue has no schedules: it is an outbox")
    return found


def _schedule_object(schedule: Schedule) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.structs.asdict(schedule)
    template = shown.pop("template")
    return shown | {"task": template.task, "payload": shown_json(template.payload.encode())}


def _schedule_row(schedule: dict[str, Any]) -> list[str]:
    times = f"{schedule['cron']} {schedule['tz']}"
    if schedule["every_ms"]:
        times = f"every {schedule['every_ms'] / 1000:g} s"
    next_at = datetime.fromtimestamp(min(schedule["next_ms"], TIME_MS_MAX) // 1000, UTC)
    due = next_at.strftime("%Y-%m-%d %H:%M:%S UTC") if schedule["next_ms"] else "never"
    shown = [schedule[name] for name in ("missed", "last_id", "error")]
    return [schedule["name"], schedule["task"], times, due, *shown]


@click.group("outbox")
def outbox_command() -> None:
    """List the events of an inbox's outbox, and deliver them again.

    \b
    tenure outbox ls --status dead_letter --queue inbox+sqlite:///jobs.db
    tenure outbox redeliver EVENT_ID --queue inbox+sqlite:///jobs.db
    """


@outbox_command.command("ls")
@click.option("--status", "status", help="queued, claimed, succeeded or dead_letter.")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, help="How many (50).")
@queue_option
@json_option
def _outbox_ls(status: str | None, limit: int, queue_url: str | None, as_json: bool) -> None:
    """List events, newest first."""
    states = (status,) if status else ()
    query = Query(states=states, limit=limit)
    page = with_ledger(_outbox_url(queue_url), lambda ledger: ledger.find(query))
    events = [_event_object(event) for event in page.jobs]
    headers = ["EVENT", "STATUS", "TRIES", "TO", "SINCE"]
    answer_rows(as_json, events, headers, _event_row, "no such events")


@outbox_command.command("redeliver")
@click.argument("event_ids", metavar="EVENT...", nargs=-1, required=True)
@queue_option
@json_option
def _redeliver(event_ids: tuple[str, ...], queue_url: str | None, as_json: bool) -> None:
    """Send events again that were delivered or given up, under the same ids."""
    answers = with_ledger(_outbox_url(queue_url), lambda ledger: ledger.retry(event_ids))
    for event_id, answered in zip(event_ids, answers, strict=True):
        answer(as_json, {"event_id": event_id, "answer": answered}, f"{event_id} {answered}")
    if "missing" in answers:
        raise NotFound("there is no such event; `tenure outbox ls` lists those there are")


def _event_object(event: JobRecord) -> dict[str, Any]:
    return {
        "event_id": event.job_id,
        "job_id": event.gid,
        "status": event.state,
        "attempt": event.attempt,
        "url": event.extra.get("status_webhook_url", ""),
        "created_ms": event.created_ms,
        "updated_ms": event.updated_ms,
        "due_ms": event.due_ms,
    }


def _event_row(event: dict[str, Any]) -> list[str]:
    shown = [str(event[name]) for name in ("event_id", "status", "attempt", "url")]
    return [*shown, ago(event["created_ms"])]


def _outbox_url(queue_url: str | None) -> str:
    text = load_config().text("queue_url", queue_url)
    if not has_part(text, "outbox"):
        raise UsageError(f"{parse_url(text).safe} has no outbox")
    return text if "box=outbox" in text else with_options(text, box="outbox")
