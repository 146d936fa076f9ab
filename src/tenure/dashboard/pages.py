"""What each page shows: its template and the values for it. Nothing here changes anything."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from tenure.core.errors import NotFound, StoreError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.redacting import Redaction
from tenure.core.seam import Counts, is_full
from tenure.dashboard import charts
from tenure.dashboard.acting import VERBS, Actor
from tenure.dashboard.boxes import boxes, command_of, curl_of
from tenure.dashboard.delivering import CHOICES, deliveries, outboxes
from tenure.dashboard.finding import COUNT_MAX, Finder
from tenure.dashboard.gathering import (
    Warn,
    by_kind,
    dead_letters,
    lines_of,
    overdue,
    warnings,
    workers,
)
from tenure.dashboard.history import Histories
from tenure.dashboard.house import House, Street
from tenure.dashboard.job_facts import (
    brief_of,
    facts_of,
    job_path,
    pretty,
    progress_of,
    trace_link,
)
from tenure.dashboard.kinds import KINDS, kind_of
from tenure.dashboard.reading import decoded, fault_of
from tenure.dashboard.search import HELP, Search, SearchError, parse
from tenure.dashboard.shapes import event_line, job_line
from tenure.dashboard.timeline import Timeline, timeline
from tenure.dashboard.visit import Visit, with_params
from tenure.dashboard.watching import Watch

_EVENTS_MAX = 1_000
_EVENTS_READ = 5 * _EVENTS_MAX
_EVENTS_SHOWN = 200
_GROUPS_SHOWN = 200
_WORKERS_SHOWN = 500
_SPAN_S = 300


class Page(msgspec.Struct, frozen=True):
    """A template and its values."""

    template: str
    values: dict[str, Any]
    status: int = 200


class Pages:
    """All pages of a dashboard."""

    def __init__(
        self,
        street: Street,
        finder: Finder,
        actor: Actor,
        watch: Watch,
        redaction: Redaction,
        *,
        trace_url: str = "",
        lake: str = "",
        store_warnings: Callable[[], Awaitable[list[Warn]]],
    ) -> None:
        self._street = street
        self._finder = finder
        self._actor = actor
        self._watch = watch
        self._redaction = redaction
        self._trace_url = trace_url
        self._histories = Histories(lake)
        self._store_warnings = store_warnings

    async def overview(self, visit: Visit) -> Page:
        """Figures of all queues, warnings, and how to submit a job."""
        await self._watch.look()
        now_s = int(time.time())
        seconds = [s for o in self._watch.observers.values() for s in o.window()]
        figures = self._watch.figures(span_s=_SPAN_S)
        counts = [o.counts for o in self._watch.observers.values() if o.counts is not None]
        base = str(visit.request.base_url).rstrip("/")
        recent = await self._recent_tasks()
        return Page(
            "overview.html",
            {
                "title": "Overview",
                "figures": figures,
                "per_s": self._watch.rate(),
                "waiting": sum(by_kind(each).get("waiting", 0) for each in counts),
                "running": sum(by_kind(each).get("running", 0) for each in counts),
                "oldest_ms": max((each.oldest_waiting_ms for each in counts), default=0),
                "heat_wait": charts.heat_map(seconds, "wait", now_s=now_s),
                "heat_run": charts.heat_map(seconds, "run", now_s=now_s),
                "queues": [self._queue_row(house) for house in self._street],
                "warnings": await self._warnings(now_s * 1000),
                "boxes": boxes(self._street, base, recent),
                "errors": [
                    (self._redaction.text(name), count) for name, count in _top_errors(self._watch)
                ],
            },
        )

    async def jobs(self, visit: Visit) -> Page:
        """A search and what it finds."""
        text, after = visit.query("q"), visit.query("after")
        values: dict[str, Any] = {
            "title": "Jobs",
            "q": text,
            "after": after,
            "help": HELP,
            "queues": self._street.names,
            "kinds": KINDS,
            "verbs": VERBS,
            "jobs": [],
            "more": "",
            "complete": True,
            "wrong_search": "",
            "confirm": {verb: with_params("/jobs/confirm", verb=verb, q=text) for verb in VERBS},
        }
        try:
            found = await self._finder.page(_search(text), after=after)
        except SearchError as error:
            return Page("jobs.html", values | {"wrong_search": str(error)}, status=422)
        values["jobs"] = [job_line(each.queue, each.job) for each in found.jobs]
        values["more"] = with_params("/jobs", q=text, after=found.after) if found.after else ""
        values["complete"] = found.complete
        return Page("jobs.html", values)

    async def confirm(self, visit: Visit) -> Page:
        """How many jobs an action would meet, before it is begun."""
        text, verb = visit.query("q"), visit.query("verb")
        if verb not in VERBS:
            raise NotFound(f"there is no action {verb!r}; there are {', '.join(VERBS)}")
        count = await self._finder.count(_search(text), scan_max=COUNT_MAX)
        return Page(
            "confirm.html",
            {"title": f"{verb.capitalize()} jobs", "q": text, "verb": verb, "count": count},
        )

    async def job(self, visit: Visit) -> Page:
        """Everything about one job."""
        queue = visit.request.path_params["queue"]
        house = self._street[queue]
        job = await house.ledger.get(visit.request.path_params["job_id"])
        if job is None:
            raise NotFound("there is no such job (any more): it expired, was removed, or never was")
        job = await self._redaction.seen(job)
        events = await self._events(house, job.job_id)
        latest = await self._redaction.events(events[-_EVENTS_SHOWN:])
        now_ms = time.time_ns() // 1_000_000
        base = str(visit.request.base_url).rstrip("/")
        payload = decoded(job.payload)
        return Page(
            "job.html",
            {
                "title": f"{job.task} {job.job_id}",
                "queue": queue,
                "job": job,
                "kind": kind_of(job.state),
                "fault": fault_of(job.error),
                "payload": pretty(payload),
                "result": pretty(decoded(job.result)) if job.result else "",
                "error": pretty(decoded(job.error)) if job.error else "",
                "progress": progress_of(job),
                "timeline": self._timeline(queue, job, events, now_ms),
                "events": [(line, brief_of(line.data)) for line in map(event_line, latest)],
                "events_left_out": max(0, len(events) - _EVENTS_SHOWN),
                "events_unread": is_full(events, _EVENTS_READ),
                "facts": facts_of(job),
                "trace": trace_link(self._trace_url, job.trace),
                "curl": curl_of(base, queue, job.task, payload),
                "command": command_of(house.address, job.task, payload),
                "my_path": job_path(queue, job.job_id),
            },
        )

    async def queues(self, visit: Visit) -> Page:
        """All queues with their depths and rates."""
        await self._watch.look()
        lines = await asyncio.gather(
            *(lines_of(house.name, self._finder) for house in self._street)
        )
        rows = [
            {**self._queue_row(house), "lines": each}
            for house, each in zip(self._street, lines, strict=True)
        ]
        return Page("queues.html", {"title": "Queues", "queues": rows})

    async def workers(self, visit: Visit) -> Page:
        """Who works, and on what."""
        await self._watch.look()
        found = await workers(self._street, self._finder, self._watch)
        wanted = visit.query("q").lower()
        shown = [w for w in found if wanted in w.worker_id.lower() or wanted in w.queue.lower()]
        return Page("workers.html", {"title": "Workers", "workers": shown[:_WORKERS_SHOWN],
                                     "left_out": max(0, len(shown) - _WORKERS_SHOWN),
                                     "q": visit.query("q"), "total": len(found)})  # fmt: skip

    async def dead(self, visit: Visit) -> Page:
        """Failed jobs by error class."""
        dead = await dead_letters(self._finder, scan_max=COUNT_MAX)
        groups = [
            (group, f'queue:{group.queue} is:failed error:"{group.error_class}"')
            for group in dead.groups[:_GROUPS_SHOWN]
        ]
        left_out = len(dead.groups) - len(groups)
        return Page("dead.html", {"title": "Dead letters", "groups": groups, "left_out": left_out,
                                  "complete": dead.complete})  # fmt: skip

    async def outbox(self, visit: Visit) -> Page:
        """Webhooks: which are on their way, which arrived, which were given up."""
        names = outboxes(self._street)
        if not names:
            raise NotFound("no queue of this gateway has an outbox; an inbox+... queue has one")
        queue, kind = visit.query("queue") or names[0], visit.query("kind")
        if kind not in dict(CHOICES):
            raise NotFound(f"there are no such events; there are {', '.join(filter(None, KINDS))}")
        found = await deliveries(
            self._street, queue, self._redaction, kind=kind, after=visit.query("after")
        )
        more = with_params("/outbox", queue=queue, kind=kind, after=found.after)
        return Page(
            "outbox.html",
            {
                "title": "Outbox",
                "names": names,
                "queue": queue,
                "kind": kind,
                "choices": CHOICES,
                "events": found.events,
                "more": more if found.after else "",
            },
        )

    async def audit(self, visit: Visit) -> Page:
        """Who did what."""
        before = visit.query("before")
        entries = await self._actor.audit.list(before=before, limit=101)
        more = with_params("/audit", before=entries[99].id) if len(entries) > 100 else ""
        return Page("audit.html", {"title": "Audit", "entries": entries[:100], "more": more,
                                   "bulks": self._actor.bulks()[:10]})  # fmt: skip

    async def history(self, visit: Visit) -> Page:
        """What the pipeline made of the past."""
        queue = visit.query("q")
        past = await self._histories.read(queue)
        return Page("history.html", {"title": "History", "past": past, "q": queue})

    async def bulk(self, visit: Visit) -> Page:
        """How far an action on many jobs is."""
        bulk = self._actor.bulk(visit.request.path_params["bulk_id"])
        back = with_params("/jobs", q=bulk.search)
        return Page("bulk.html", {"title": f"{bulk.verb.capitalize()} jobs", "bulk": bulk,
                                  "back": back})  # fmt: skip

    async def _warnings(self, now_ms: int) -> list[Warn]:
        found = warnings(self._watch, now_ms=now_ms)
        try:
            found += await overdue(self._finder, now_ms=now_ms)
            return [*found, *(await self._store_warnings())]
        except StoreError:  # which is among what was found
            return found

    async def _events(self, house: House, job_id: str) -> list[JobEvent]:
        events: list[JobEvent] = []
        while not is_full(events, _EVENTS_READ):
            after = events[-1].event_id if events else ""
            step = await house.ledger.events(job_id, after=after, limit=_EVENTS_MAX)
            events += step
            if not is_full(step, _EVENTS_MAX):
                break
        return events

    def _timeline(
        self, queue: str, job: JobRecord, events: list[JobEvent], now_ms: int
    ) -> Timeline:
        """By the job's own events; by the journal where those tell of fewer attempts."""
        own = timeline(job, events, now_ms=now_ms)
        if own.told >= job.attempt:
            return own
        told = timeline(job, self._watch.observers[queue].story(job.job_id), now_ms=now_ms)
        return told if told.told > own.told else own

    async def _recent_tasks(self) -> dict[str, JobRecord]:
        """The newest job of each queue: a good example of what it takes."""
        found: dict[str, JobRecord] = {}
        for house in self._street:
            try:
                page = await self._finder.page(parse(f"queue:{house.name}", now_ms=0), limit=1)
                job = await house.ledger.get(page.jobs[0].job.job_id) if page.jobs else None
            except StoreError:
                continue
            if job is not None:
                found[house.name] = await self._redaction.seen(job)
        return found

    def _queue_row(self, house: House) -> dict[str, Any]:
        observer = self._watch.observers[house.name]
        counts = observer.counts or Counts({})
        now_s = time.time()
        depths = [(at, float(by_kind(c).get("waiting", 0))) for at, c in observer.depths]
        rates = [(float(row[0]), float(row[3])) for row in self._watch.series(house.name)]
        figures = self._watch.figures(house.name, span_s=_SPAN_S)
        depth, rate = charts.folded(depths, now_s=now_s), charts.folded(rates, now_s=now_s)
        return {
            "name": house.name,
            "contract": house.contract,
            "counts": counts,
            "away": observer.away,
            "kinds": by_kind(counts),
            "states": [(s, n) for s, n in counts.states.items() if n],
            "figures": figures,
            "per_s": self._watch.rate(house.name),
            "depth_spark": charts.sparkline(depth, "waiting, last 15 minutes"),
            "rate_spark": charts.sparkline(rate, "done a second, last 15 minutes"),
        }


def _search(text: str) -> Search:
    return parse(text, now_ms=time.time_ns() // 1_000_000)


def _top_errors(watch: Watch) -> list[tuple[str, int]]:
    total: dict[str, int] = {}
    for observer in watch.observers.values():
        for name, count in observer.errors.items():
            total[name] = total.get(name, 0) + count
    return sorted(total.items(), key=lambda pair: -pair[1])[:5]
