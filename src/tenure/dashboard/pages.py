"""The pages: the template and the values of each. They only read."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import quote, urlencode

import msgspec
from starlette.requests import Request

from tenure.core.endpoint import Caller
from tenure.core.errors import NotFound, StoreError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.portable import STATES, portable_counts, state_of, word_state
from tenure.core.redaction import Redaction
from tenure.core.registry import find_contract
from tenure.core.seam import Counts, is_full
from tenure.dashboard.actions import VERBS, Actions
from tenure.dashboard.api import BASE
from tenure.dashboard.charts import Timeline, heat_map, read_history, sparkline, timeline
from tenure.dashboard.display import (
    brief_of,
    decode_json,
    error_info,
    facts_of,
    job_path,
    now_ms,
    pretty,
    progress_of,
    trace_link,
)
from tenure.dashboard.finder import COUNT_MAX, JobFinder
from tenure.dashboard.queues import OpenQueue, QueueRegistry, event_state
from tenure.dashboard.search import HELP, SearchError, parse_now
from tenure.dashboard.views import (
    DELIVERY_KINDS,
    QueueWarning,
    ScheduleView,
    dead_letters,
    deliveries,
    event_row,
    job_row,
    outboxes,
    overdue,
    schedules,
    waiting_spread,
    warnings,
    workers,
)
from tenure.dashboard.watch import JournalWatch

_EVENTS_PAGE = 1_000
_EVENTS_MAX = 5_000
_EVENTS_SHOWN = 200
_GROUPS_SHOWN = 200
_WORKERS_SHOWN = 500
_AUDIT_PAGE = 100
_SPAN_S = 300


@dataclass(frozen=True, slots=True)
class PageRequest:
    """An authenticated request. `form` has the posted fields, in order."""

    request: Request
    caller: Caller
    form: tuple[tuple[str, str], ...] = ()

    @property
    def may_act(self) -> bool:
        """Whether the pages show buttons for actions."""
        return self.caller.may("admin")

    @property
    def who(self) -> str:
        """The name of the caller in the audit log."""
        return self.caller.who

    def field(self, name: str, default: str = "") -> str:
        """The last posted value of a field."""
        return dict(self.form).get(name, default)

    def fields(self, name: str) -> list[str]:
        """All posted values of a field."""
        return [value for key, value in self.form if key == name]

    def query(self, name: str, default: str = "") -> str:
        """A parameter of the URL."""
        return str(self.request.query_params.get(name, default))

    @property
    def base(self) -> str:
        """The prefix under which an application serves the gateway."""
        return base_of(self.request)

    @property
    def base_url(self) -> str:
        """The address of this gateway as the client sees it."""
        url = self.request.url
        return f"{url.scheme}://{url.netloc}{self.base}"


class Page(msgspec.Struct, frozen=True):
    """A template and its values."""

    template: str
    values: dict[str, Any]
    status: int = 200


class SubmitExample(msgspec.Struct, frozen=True):
    """Commands and code that submit a job to one queue, to be copied."""

    queue: str
    contract: str
    task: str
    payload: str
    examples: list[tuple[str, str]]


PageHandler: TypeAlias = Callable[[PageRequest], Coroutine[Any, Any, Page]]


def base_of(request: Request) -> str:
    """The prefix under which an application serves the gateway, "" for none."""
    return str(request.scope.get(BASE, ""))


def with_params(path: str, **params: Any) -> str:
    """A local address with those parameters that are not empty."""
    kept = {name: value for name, value in params.items() if value not in ("", None)}
    return f"{path}?{urlencode(kept)}" if kept else path


class Pages:
    """The handlers of the pages. Each takes a request and returns template and values."""

    def __init__(
        self,
        queues: QueueRegistry,
        finder: JobFinder,
        actions: Actions,
        watch: JournalWatch,
        redaction: Redaction,
        *,
        trace_url: str = "",
        lake: str = "",
        store_warnings: Callable[[], Awaitable[list[QueueWarning]]],
    ) -> None:
        self._queues = queues
        self._finder = finder
        self._actions = actions
        self._watch = watch
        self._redaction = redaction
        self._trace_url = trace_url
        self._lake = lake
        self._store_warnings = store_warnings

    def handlers(self) -> dict[str, PageHandler]:
        """The handlers by path."""
        return {
            "/": self._overview,
            "/jobs": self._jobs,
            "/jobs/confirm": self._confirm,
            "/jobs/{queue}/{job_id:path}": self._job,
            "/queues": self._queues_page,
            "/workers": self._workers,
            "/dead": self._dead,
            "/outbox": self._outbox,
            "/history": self._history,
            "/audit": self._audit,
            "/bulk/{bulk_id}": self._bulk,
        }

    async def _overview(self, request: PageRequest) -> Page:
        await self._watch.sample()
        now_s = int(time.time())
        observers = self._watch.observers.values()
        seconds = [second for observer in observers for second in observer.window()]
        counts = [observer.counts for observer in observers if observer.counts is not None]
        depths = [observer.depth_by_state for observer in observers]
        errors = sum((observer.errors for observer in observers), Counter[str]())
        return Page(
            "overview.html",
            {
                "title": "Overview",
                "figures": self._watch.figures(span_s=_SPAN_S),
                "per_s": self._watch.rate(),
                "waiting": sum(each["waiting"] for each in depths),
                "running": sum(each["running"] for each in depths),
                "oldest_ms": max((each.oldest_waiting_ms for each in counts), default=0),
                "heat_wait": heat_map(seconds, "wait", now_s=now_s),
                "heat_run": heat_map(seconds, "run", now_s=now_s),
                "queues": [self._queue_row(queue) for queue in self._queues],
                "warnings": await self._warnings(now_s * 1000),
                "boxes": await self._examples(request.base_url),
                "errors": [
                    (self._redaction.text(name), count) for name, count in errors.most_common(5)
                ],
            },
        )

    async def _jobs(self, request: PageRequest) -> Page:
        text, after = request.query("q"), request.query("after")
        values: dict[str, Any] = {
            "title": "Jobs",
            "q": text,
            "help": HELP,
            "queues": self._queues.names,
            "states": STATES,
            "verbs": VERBS,
            "jobs": [],
            "more": "",
            "complete": True,
            "wrong_search": "",
            "confirm": {verb: with_params("/jobs/confirm", verb=verb, q=text) for verb in VERBS},
        }
        try:
            found = await self._finder.page(parse_now(text), after=after)
        except SearchError as error:
            return Page("jobs.html", values | {"wrong_search": str(error)}, status=422)
        values["jobs"] = [job_row(each.queue, each.job) for each in found.jobs]
        values["more"] = with_params("/jobs", q=text, after=found.after) if found.after else ""
        values["complete"] = found.complete
        return Page("jobs.html", values)

    async def _confirm(self, request: PageRequest) -> Page:
        """How many jobs a bulk action would affect, before it starts."""
        text, verb = request.query("q"), request.query("verb")
        if verb not in VERBS:
            raise NotFound(f"{verb!r} is not an action; the actions are {', '.join(VERBS)}")
        count = await self._finder.count(parse_now(text), scan_max=COUNT_MAX)
        title = f"{verb.capitalize()} jobs"
        return Page("confirm.html", {"title": title, "q": text, "verb": verb, "count": count})

    async def _job(self, request: PageRequest) -> Page:
        queue = request.request.path_params["queue"]
        open_queue = self._queues[queue]
        job = await open_queue.ledger.get(request.request.path_params["job_id"])
        if job is None:
            raise NotFound("there is no such job: it has expired, was removed, or never existed")
        job = await self._redaction.seen(job)
        events = await _events(open_queue, job.job_id)
        latest = await self._redaction.events(events[-_EVENTS_SHOWN:])
        payload = decode_json(job.payload)
        return Page(
            "job.html",
            {
                "title": f"{job.task} {job.job_id}",
                "queue": queue,
                "job": job,
                "state": state_of(job),
                "fault": error_info(job.error),
                "payload": pretty(payload),
                "result": pretty(decode_json(job.result)) if job.result else "",
                "error": pretty(decode_json(job.error)) if job.error else "",
                "progress": progress_of(job),
                "timeline": self._timeline(queue, job, events),
                "events": [
                    (row, event_state(job.contract, row.type), brief_of(row.data))
                    for row in map(event_row, latest)
                ],
                "events_left_out": max(0, len(events) - _EVENTS_SHOWN),
                "events_unread": is_full(events, _EVENTS_MAX),
                "facts": facts_of(job),
                "trace": trace_link(self._trace_url, job.trace),
                "curl": _curl(request.base_url, queue, job.task, payload),
                "command": _command(open_queue.address, job.task, payload),
                "my_path": job_path(queue, job.job_id),
            },
        )

    async def _queues_page(self, request: PageRequest) -> Page:
        await self._watch.sample()
        spreads = await asyncio.gather(
            *(waiting_spread(name, self._finder) for name in self._queues.names)
        )
        rows = [
            {**self._queue_row(queue), "spread": spread}
            for queue, spread in zip(self._queues, spreads, strict=True)
        ]
        stored: list[ScheduleView] = []
        with contextlib.suppress(StoreError):  # the rows say that no store answers
            stored = await schedules(self._queues)
        return Page("queues.html", {"title": "Queues", "queues": rows, "schedules": stored})

    async def _workers(self, request: PageRequest) -> Page:
        await self._watch.sample()
        found = await workers(self._queues, self._finder, self._watch)
        text = request.query("q")
        shown = [
            each for each in found if text.lower() in f"{each.worker_id}\n{each.queue}".lower()
        ]
        return Page(
            "workers.html",
            {
                "title": "Workers",
                "workers": shown[:_WORKERS_SHOWN],
                "left_out": max(0, len(shown) - _WORKERS_SHOWN),
                "q": text,
                "total": len(found),
            },
        )

    async def _dead(self, request: PageRequest) -> Page:
        dead = await dead_letters(self._finder, scan_max=COUNT_MAX)
        groups = [
            (group, f'queue:{group.queue} is:failed error:"{group.error_class}"')
            for group in dead.groups[:_GROUPS_SHOWN]
        ]
        return Page(
            "dead.html",
            {
                "title": "Dead letters",
                "groups": groups,
                "left_out": len(dead.groups) - len(groups),
                "complete": dead.complete,
            },
        )

    async def _outbox(self, request: PageRequest) -> Page:
        names = outboxes(self._queues)
        if not names:
            raise NotFound("no queue of this gateway has an outbox")
        queue, kind = request.query("queue") or names[0], request.query("kind")
        if kind not in DELIVERY_KINDS:
            kinds = ", ".join(filter(None, DELIVERY_KINDS))
            raise NotFound(f"{kind!r} is not a kind of events; the kinds are {kinds}")
        found = await deliveries(
            self._queues, queue, self._redaction, kind=kind, after=request.query("after")
        )
        more = with_params("/outbox", queue=queue, kind=kind, after=found.after)
        return Page(
            "outbox.html",
            {
                "title": "Outbox",
                "names": names,
                "queue": queue,
                "kind": kind,
                "choices": list(DELIVERY_KINDS.items()),
                "events": found.events,
                "more": more if found.after else "",
            },
        )

    async def _audit(self, request: PageRequest) -> Page:
        before = request.query("before")
        entries = await self._actions.audit.list(before=before, limit=_AUDIT_PAGE + 1)
        shown, rest = entries[:_AUDIT_PAGE], entries[_AUDIT_PAGE:]
        more = with_params("/audit", before=shown[-1].id) if rest else ""
        bulks = self._actions.bulks()[:10]
        return Page(
            "audit.html", {"title": "Audit", "entries": shown, "more": more, "bulks": bulks}
        )

    async def _history(self, request: PageRequest) -> Page:
        queue = request.query("q")
        history = await asyncio.to_thread(read_history, self._lake, queue=queue)
        return Page("history.html", {"title": "History", "history": history, "q": queue})

    async def _bulk(self, request: PageRequest) -> Page:
        bulk = self._actions.bulk(request.request.path_params["bulk_id"])
        back = with_params("/jobs", q=bulk.search)
        title = f"{bulk.verb.capitalize()} jobs"
        return Page("bulk.html", {"title": title, "bulk": bulk, "back": back})

    async def _warnings(self, now_ms: int) -> list[QueueWarning]:
        found = warnings(self._watch, now_ms=now_ms)
        try:
            found += await overdue(self._finder, now_ms=now_ms)
            return [*found, *(await self._store_warnings())]
        except StoreError:  # `warnings` has reported it already
            return found

    def _timeline(self, queue: str, job: JobRecord, events: list[JobEvent]) -> Timeline:
        """From the job's own events, or from the journal if that has more attempts."""
        read_ms = now_ms()
        own = timeline(job, events, now_ms=read_ms)
        if own.total >= job.attempt:
            return own
        history = self._watch.observers[queue].history(job.job_id)
        journaled = timeline(job, history, now_ms=read_ms)
        return journaled if journaled.total > own.total else own

    async def _examples(self, base: str) -> list[SubmitExample]:
        """How to submit to each queue, with its newest job as the example."""
        examples = []
        for queue in self._queues:
            if queue.ledger.features.is_outbox:
                continue  # jobs of an outbox are made by other jobs, not submitted
            job = await self._newest(queue)
            task = job.task if job else "chat"
            payload = decode_json(job.payload) if job else {"prompt": "Say hello."}
            examples.append(_example(queue, base, task, payload))
        return examples

    async def _newest(self, queue: OpenQueue) -> JobRecord | None:
        try:
            page = await self._finder.page(parse_now(f"queue:{queue.name}"), limit=1)
            job = await queue.ledger.get(page.jobs[0].job.job_id) if page.jobs else None
        except StoreError:
            return None
        return await self._redaction.seen(job) if job is not None else None

    def _queue_row(self, queue: OpenQueue) -> dict[str, Any]:
        observer = self._watch.observers[queue.name]
        counts = observer.counts or Counts({})
        now_s = time.time()
        contract = queue.contract
        depths = [
            (at, portable_counts(contract, each.states)["waiting"]) for at, each in observer.depths
        ]
        rates = [(row[0], row[3]) for row in self._watch.series(queue.name)]
        return {
            "name": queue.name,
            "contract": queue.contract,
            "counts": counts,
            "away": observer.away,
            "states": [
                (word_state(contract, word) or "waiting", word, count)
                for word, count in counts.states.items()
                if count
            ],
            "figures": self._watch.figures(queue.name, span_s=_SPAN_S),
            "per_s": self._watch.rate(queue.name),
            "depth_spark": sparkline(depths, now_s=now_s),
            "rate_spark": sparkline(rates, now_s=now_s),
        }


async def _events(queue: OpenQueue, job_id: str) -> list[JobEvent]:
    events: list[JobEvent] = []
    while not is_full(events, _EVENTS_MAX):
        after = events[-1].event_id if events else ""
        page = await queue.ledger.events(job_id, after=after, limit=_EVENTS_PAGE)
        events += page
        if not is_full(page, _EVENTS_PAGE):
            break
    return events


def _example(queue: OpenQueue, base: str, task: str, payload: Any) -> SubmitExample:
    examples = [
        ("curl", _curl(base, queue.name, task, payload)),
        ("command line", _command(queue.address, task, payload)),
    ]
    contract = find_contract(queue.contract)
    if contract is not None and contract.submit_example is not None:
        name, text = contract.submit_example
        filled = text.format(
            base=base,
            short=queue.name.partition(":")[2] or "jobs",
            store=queue.address.partition("+")[2].partition("?")[0],
            task=_json(task),
            payload=_json(payload),
            quoted=repr(_json(payload)),
            body=shlex.quote(_json({"task": task, "payload": payload})),
        )
        examples.append((name, filled))
    return SubmitExample(queue.name, queue.contract, task, _json(payload), examples)


def _curl(base: str, queue: str, task: str, payload: Any) -> str:
    body = shlex.quote(_json({"task": task, "payload": payload}))
    url = f"{base}/api/queues/{quote(queue, safe=':')}/jobs"
    return f"curl -s {url} \\\n  -H 'content-type: application/json' -d {body}"


def _command(address: str, task: str, payload: Any) -> str:
    data, url = shlex.quote(_json(payload)), shlex.quote(address)
    return f"tenure submit {shlex.quote(task)} -q {url} \\\n  -d {data}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
