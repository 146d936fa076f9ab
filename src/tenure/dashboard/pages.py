"""What each page shows: its template and the values for it. Nothing here changes anything."""

from __future__ import annotations

import asyncio
import secrets
import shlex
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, quote, urlencode

import msgspec
from starlette.requests import ClientDisconnect, Request

from tenure.core.endpoint import Caller, Refused
from tenure.core.errors import NotFound, StoreError, UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.redacting import Redaction
from tenure.core.seam import Counts
from tenure.dashboard import charts
from tenure.dashboard.actions import VERBS, Actions
from tenure.dashboard.charts import Timeline, timeline
from tenure.dashboard.display import (
    brief_of,
    decode_json,
    error_info,
    facts_of,
    job_path,
    pretty,
    progress_of,
    trace_link,
)
from tenure.dashboard.history import Histories
from tenure.dashboard.queues import KINDS, QueueRegistry, ServedQueue, kind_of
from tenure.dashboard.search import COUNT_MAX, HELP, Finder, Search, SearchError, parse
from tenure.dashboard.views import (
    CHOICES,
    Warn,
    by_kind,
    dead_letters,
    deliveries,
    event_row,
    job_row,
    outboxes,
    overdue,
    waiting_spread,
    warnings,
    workers,
)
from tenure.dashboard.watch import Watch

_FIELDS_MAX = 1_000
_NOTICES_MAX = 500
_AT_ONCE_MAX = 8
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class PageRequest:
    """A request that was admitted. `form` holds what was posted, in order."""

    request: Request
    caller: Caller
    form: tuple[tuple[str, str], ...] = ()

    @property
    def may_act(self) -> bool:
        """Whether the pages show buttons, and the buttons do something."""
        return self.caller.may("admin")

    @property
    def who(self) -> str:
        """For the audit log."""
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


def read_fields(request: Request, body: bytes) -> tuple[tuple[str, str], ...]:
    """The fields of a posted form; only the kind that needs no parser of its own."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-www-form-urlencoded":
        raise UsageError("a form is sent as application/x-www-form-urlencoded")
    try:
        text = body.decode(errors="replace")
        return tuple(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise UsageError(f"a form has at most {_FIELDS_MAX} fields") from None


def path_of(request: Request) -> str:
    """The path as it was sent, whatever the Host header says."""
    return str(request.scope.get("raw_path", b"/").decode("latin-1"))


class SearchLimit:
    """Requests that look at many jobs: some at once for each key, and none without its client."""

    def __init__(self) -> None:
        self.at_work: Counter[str] = Counter()

    async def run(
        self, who: str, gone: Callable[[], Awaitable[None]] | None, work: Coroutine[Any, Any, _T]
    ) -> _T:
        """The result of the work, which is cancelled when the client hangs up."""
        if self.at_work[who] >= _AT_ONCE_MAX:
            work.close()
            raise Refused(
                "too_many_searches",
                f"this key has {_AT_ONCE_MAX} searches at work: wait for their answers",
            )
        self.at_work[who] += 1
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(gone()) if gone else asyncio.Future[None]()
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)
            self.at_work[who] -= 1
            if not self.at_work[who]:
                del self.at_work[who]


class Notices:
    """What an action has to say on the page after it, kept until it is read or crowded out."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()

    def leave(self, text: str) -> str:
        """Keep a text; the answer goes into the URL as `n`."""
        token = secrets.token_urlsafe(6)
        self._texts[token] = text
        if len(self._texts) > _NOTICES_MAX:
            self._texts.popitem(last=False)
        return token

    def read(self, token: str) -> str:
        """The text, once."""
        return self._texts.pop(token, "") if token else ""


def with_params(path: str, **params: Any) -> str:
    """A local address with parameters, those left out that are empty."""
    kept = {name: value for name, value in params.items() if value not in ("", None)}
    return f"{path}?{urlencode(kept)}" if kept else path


def local_path(text: str, default: str) -> str:
    """An address to go back to, if it is one of ours."""
    ours = text.startswith("/") and not text.startswith(("//", "/\\")) and "\n" not in text
    return text if ours else default


_STREAMS = """\
curl -s {base}/v1/jobs -H 'content-type: application/json' \\
  -d '{{"task": "chat", "payload": {{"prompt": "Say hello."}}}}'"""
_BULLMQ = """\
import {{ Queue }} from 'bullmq'
const queue = new Queue('{short}', {{ connection: {{ url: '{store}' }} }})
await queue.add({task}, {payload})
await queue.close()"""
_OMNIQ = """\
import asyncio, json
from tenure.contracts.omniq import Client

async def main():
    async with Client('{store}') as client:
        print(await client.publish('{short}', json.loads({quoted})))

asyncio.run(main())"""
_PLANE = """\
curl -s {base}/v1/plane/jobs -H 'content-type: application/json' \\
  -d {body}"""
# What a contract's own clients write; a contract that is not here has the two ways all have.
_NATIVE = {
    "streams": ("curl, the contract's own endpoint", _STREAMS),
    "bullmq": ("Node, with the bullmq package", _BULLMQ),
    "omniq": ("Python, with the contract's own client", _OMNIQ),
    "plane": ("curl, the contract's own endpoint", _PLANE),
}


class Box(msgspec.Struct, frozen=True):
    """How to submit to one queue."""

    queue: str
    contract: str
    task: str
    payload: str
    ways: tuple[tuple[str, str], ...]


def boxes(street: QueueRegistry, base: str, recent: dict[str, JobRecord]) -> list[Box]:
    """One box a queue, with the newest job as the example."""
    made = []
    for house in street:
        if getattr(house.ledger, "is_outbox", False):
            continue  # its jobs are made by the steps of others
        job = recent.get(house.name)
        task = job.task if job else "chat"
        payload = decode_json(job.payload) if job else {"prompt": "Say hello."}
        ways = [
            ("curl", curl_of(base, house.name, task, payload)),
            ("command line", command_of(house.address, task, payload)),
        ]
        if house.contract in _NATIVE:
            name, text = _NATIVE[house.contract]
            filled = text.format(
                base=base,
                short=house.name.partition(":")[2] or "jobs",
                store=house.address.partition("+")[2].partition("?")[0],
                task=_json(task),
                payload=_json(payload),
                quoted=repr(_json(payload)),
                body=shlex.quote(_json({"task": task, "payload": payload})),
            )
            ways.append((name, filled))
        made.append(Box(house.name, house.contract, task, _json(payload), tuple(ways)))
    return made


def curl_of(base: str, queue: str, task: str, payload: Any) -> str:
    """The job as a curl command."""
    body = shlex.quote(_json({"task": task, "payload": payload}))
    url = f"{base}/api/queues/{quote(queue, safe=':')}/jobs"
    return f"curl -s {url} \\\n  -H 'content-type: application/json' -d {body}"


def command_of(address: str, task: str, payload: Any) -> str:
    """The job as a command of ours, run where the queue's store can be reached."""
    data, url = shlex.quote(_json(payload)), shlex.quote(address)
    return f"tenure submit {shlex.quote(task)} -q {url} \\\n  -d {data}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


_EVENTS_MAX = 1_000
_EVENTS_SHOWN = 200
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
        street: QueueRegistry,
        finder: Finder,
        actor: Actions,
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

    async def overview(self, visit: PageRequest) -> Page:
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

    async def jobs(self, visit: PageRequest) -> Page:
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
        values["jobs"] = [job_row(each.queue, each.job) for each in found.jobs]
        values["more"] = with_params("/jobs", q=text, after=found.after) if found.after else ""
        values["complete"] = found.complete
        return Page("jobs.html", values)

    async def confirm(self, visit: PageRequest) -> Page:
        """How many jobs an action would meet, before it is begun."""
        text, verb = visit.query("q"), visit.query("verb")
        if verb not in VERBS:
            raise NotFound(f"there is no action {verb!r}; there are {', '.join(VERBS)}")
        count = await self._finder.count(_search(text), scan_max=COUNT_MAX)
        return Page(
            "confirm.html",
            {"title": f"{verb.capitalize()} jobs", "q": text, "verb": verb, "count": count},
        )

    async def job(self, visit: PageRequest) -> Page:
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
        payload = decode_json(job.payload)
        return Page(
            "job.html",
            {
                "title": f"{job.task} {job.job_id}",
                "queue": queue,
                "job": job,
                "kind": kind_of(job.state),
                "fault": error_info(job.error),
                "payload": pretty(payload),
                "result": pretty(decode_json(job.result)) if job.result else "",
                "error": pretty(decode_json(job.error)) if job.error else "",
                "progress": progress_of(job),
                "timeline": self._timeline(queue, job, events, now_ms),
                "events": [(line, brief_of(line.data)) for line in map(event_row, latest)],
                "events_left_out": max(0, len(events) - _EVENTS_SHOWN),
                "facts": facts_of(job),
                "trace": trace_link(self._trace_url, job.trace),
                "curl": curl_of(base, queue, job.task, payload),
                "command": command_of(house.address, job.task, payload),
                "my_path": job_path(queue, job.job_id),
            },
        )

    async def queues(self, visit: PageRequest) -> Page:
        """All queues with their depths and rates."""
        await self._watch.look()
        lines = await asyncio.gather(
            *(waiting_spread(house.name, self._finder) for house in self._street)
        )
        rows = [
            {**self._queue_row(house), "lines": each}
            for house, each in zip(self._street, lines, strict=True)
        ]
        return Page("queues.html", {"title": "Queues", "queues": rows})

    async def workers(self, visit: PageRequest) -> Page:
        """Who works, and on what."""
        await self._watch.look()
        found = await workers(self._street, self._finder, self._watch)
        wanted = visit.query("q").lower()
        shown = [w for w in found if wanted in w.worker_id.lower() or wanted in w.queue.lower()]
        return Page("workers.html", {"title": "Workers", "workers": shown, "q": visit.query("q"),
                                     "total": len(found)})  # fmt: skip

    async def dead(self, visit: PageRequest) -> Page:
        """Failed jobs by error class."""
        dead = await dead_letters(self._finder, scan_max=COUNT_MAX)
        groups = [
            (group, f'queue:{group.queue} is:failed error:"{group.error_class}"')
            for group in dead.groups
        ]
        return Page("dead.html", {"title": "Dead letters", "groups": groups,
                                  "complete": dead.complete})  # fmt: skip

    async def outbox(self, visit: PageRequest) -> Page:
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

    async def audit(self, visit: PageRequest) -> Page:
        """Who did what."""
        before = visit.query("before")
        entries = await self._actor.audit.list(before=before, limit=101)
        more = with_params("/audit", before=entries[99].id) if len(entries) > 100 else ""
        return Page("audit.html", {"title": "Audit", "entries": entries[:100], "more": more,
                                   "bulks": self._actor.bulks()[:10]})  # fmt: skip

    async def history(self, visit: PageRequest) -> Page:
        """What the pipeline made of the past."""
        queue = visit.query("q")
        past = await self._histories.read(queue)
        return Page("history.html", {"title": "History", "past": past, "q": queue})

    async def bulk(self, visit: PageRequest) -> Page:
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

    async def _events(self, house: ServedQueue, job_id: str) -> list[JobEvent]:
        events: list[JobEvent] = []
        while len(events) < 5 * _EVENTS_MAX:
            after = events[-1].event_id if events else ""
            step = await house.ledger.events(job_id, after=after, limit=_EVENTS_MAX)
            events += step
            if len(step) < _EVENTS_MAX:
                break
        return events

    def _timeline(
        self, queue: str, job: JobRecord, events: list[JobEvent], now_ms: int
    ) -> Timeline:
        """By the job's own events; by the journal where those tell of fewer attempts."""
        own = timeline(job, events, now_ms=now_ms)
        if len(own.attempts) >= job.attempt:
            return own
        told = timeline(job, self._watch.observers[queue].story(job.job_id), now_ms=now_ms)
        return told if len(told.attempts) > len(own.attempts) else own

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

    def _queue_row(self, house: ServedQueue) -> dict[str, Any]:
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
