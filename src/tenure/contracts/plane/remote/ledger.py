"""The ledger and the news of a plane over HTTP.

A job is read, followed and cancelled by its id, with the rights of its producer. What concerns all
jobs of a plane (search, counts, pause) or needs an operator (retry, remove) has no route of the
plane. It goes to /api of the gateway, for which the key needs the scope `observe` or `admin`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from tenure.contracts.plane.model import CONTRACT
from tenure.contracts.plane.news import PlaneNews
from tenure.contracts.plane.remote.queue import PlaneHttp, open_http, read_answer
from tenure.core.errors import StoreUnreachable, UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import JournalEvent
from tenure.core.registry import QueueUrl
from tenure.core.seam import Counts, LedgerFeatures, Page, Query, WorkerBeat

# A client may ask for a thousand jobs at once; the gateway limits connections and requests.
_CALLS_MAX = 8
_LIMIT_MAX = 500
_NONE = msgspec.Raw(b"null")
# What a search takes as it is, in quotes.
_PLAIN = re.compile(r"[\w .:/@-]+")

T = TypeVar("T")


class _Attempt(msgspec.Struct, frozen=True):
    error: msgspec.Raw = _NONE


class _Job(msgspec.Struct, frozen=True):
    """A job as the plane answers it; JSON fields are not decoded."""

    job_id: str
    stream: str
    task: str
    status: str
    payload: msgspec.Raw
    result: msgspec.Raw
    error: msgspec.Raw
    attempt: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int = 0
    lease_until_ms: int = 0
    worker_id: str = ""
    progress: msgspec.Raw = _NONE
    priority: int = 0
    gid: str = ""
    attempts: list[_Attempt] = []


class _Event(msgspec.Struct, frozen=True):
    id: str
    type: str
    ts: int
    step: str
    data: msgspec.Raw


class _History(msgspec.Struct, frozen=True):
    events: list[_Event]


class _Found(msgspec.Struct, frozen=True):
    """A job of a search, or the job itself; only the latter has JSON fields."""

    job_id: str
    task: str
    own_state: str
    attempt: int
    max_attempts: int
    created_ms: int
    updated_ms: int
    due_ms: int
    worker_id: str
    payload: msgspec.Raw = _NONE
    result: msgspec.Raw = _NONE
    error: msgspec.Raw = _NONE
    progress: msgspec.Raw = _NONE
    lease_until_ms: int = 0
    priority: int = 0


class _Page(msgspec.Struct, frozen=True):
    jobs: list[_Found]
    after: str


class _Queue(msgspec.Struct, frozen=True):
    name: str
    contract: str
    paused: bool
    workers: int
    oldest_waiting_ms: int
    own_states: dict[str, int]
    totals: dict[str, int]
    away: bool = False


class _Queues(msgspec.Struct, frozen=True):
    queues: list[_Queue]


class RemoteLedger:
    """The jobs of a plane."""

    def __init__(self, http: PlaneHttp, *, answer_ms: int) -> None:
        self._http = http
        self._answer_s = answer_ms / 1000
        self._turns = asyncio.Semaphore(_CALLS_MAX)

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures()

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None when there is none (any more)."""
        job = await self._job(job_id)
        return None if job is None else _record(job)

    async def attempts(self, job_id: str) -> list[dict[str, Any]]:
        """The errors of the attempts at a job, oldest first."""
        job = await self._job(job_id)
        return [{"error": _bytes(each.error)} for each in job.attempts] if job else []

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own events after a position."""
        path = f"{_path(job_id)}/history?{urlencode({'after': after, 'limit': limit})}"
        answer = await self._call("GET", path, _History)
        return [
            JobEvent(
                event_id=each.id,
                type=each.type,
                ts_ms=each.ts,
                step=each.step,
                data=bytes(each.data),
            )
            for each in (answer.events if answer else [])
        ]

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (it runs), "missing", or its final state."""
        return list(await asyncio.gather(*map(self._cancel, job_ids)))

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def find(self, query: Query) -> Page:
        """A page of jobs, newest first."""
        name = (await self._queue()).name
        terms = [f'queue:"{name}"', f"state:{','.join(query.states)}" if query.states else ""]
        if _PLAIN.fullmatch(query.task):  # other names are compared here
            terms.append(f'task:"{query.task}"')
        asked = {
            "q": " ".join(filter(None, terms)),
            "after": query.after,
            "limit": min(query.limit, _LIMIT_MAX),
        }
        page = await self._api("GET", f"/api/jobs?{urlencode(asked)}", _Page)
        found = [each for each in page.jobs if query.task in ("", each.task)]
        path = f"/api/queues/{quote(name, safe='')}/jobs"
        calls = [
            self._call("GET", f"{path}/{quote(each.job_id, safe='')}", _Found) for each in found
        ]
        jobs = [_found(each, name) for each in await asyncio.gather(*calls) if each is not None]
        return Page(jobs, page.after)

    async def counts(self) -> Counts:
        """How many jobs are in which state."""
        queue = await self._queue()
        return Counts(
            queue.own_states, queue.totals, queue.paused, queue.workers, queue.oldest_waiting_ms
        )

    async def workers(self) -> list[WorkerBeat]:
        """Refused: the plane has no route for it."""
        _refuse("lists no workers")

    async def pause(self) -> None:
        """Hand out no more jobs."""
        await self._steer("pause")

    async def resume(self) -> None:
        """Hand out jobs again."""
        await self._steer("resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send ended jobs back; per id "ok", or the reason why not."""
        return await self._act("retry", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Remove jobs; per id "ok", or the reason why not."""
        return await self._act("remove", job_ids)

    async def probe(self) -> None:
        """Refused: the plane has no route for it."""
        _refuse("cannot be tested for writing")

    async def _queue(self) -> _Queue:
        """The plane among the queues of the gateway: the first one, which the routes serve too."""
        answer = await self._api("GET", "/api/queues", _Queues)
        planes = [each for each in answer.queues if each.contract == CONTRACT]
        if not planes:
            raise UsageError(f"{self._http.url} has no plane", contract=CONTRACT)
        if planes[0].away:
            raise StoreUnreachable(f"the store of the plane at {self._http.url} gives no answer")
        return planes[0]

    async def _act(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        body = msgspec.json.encode({"job_ids": list(job_ids)})
        answers = (await self._steer(verb, body))["answers"]
        return [answers.get(job_id, "missing") for job_id in job_ids]

    async def _steer(self, verb: str, body: bytes = b"") -> dict[str, Any]:
        path = f"{_queue_path((await self._queue()).name)}/{verb}"
        return await self._api("POST", path, dict[str, Any], body)

    async def _api(self, method: str, path: str, shape: type[T], body: bytes = b"") -> T:
        """The answer of /api."""
        answer = await self._call(method, path, shape, body)
        if answer is None:
            raise UsageError(
                f"{self._http.url} has no {path.partition('?')[0]}: a gateway with an admin "
                "address serves it there",
                contract=CONTRACT,
            )
        return answer

    async def _job(self, job_id: str) -> _Job | None:
        return await self._call("GET", _path(job_id), _Job)

    async def _cancel(self, job_id: str) -> str:
        async with self._turns:
            path = f"{_path(job_id)}/cancel"
            status, raw = await self._http.send("POST", path, timeout_s=self._answer_s)
        if status == 404:
            return "missing"
        if status == 409:
            job = await self._job(job_id)
            return job.status if job else "missing"
        read_answer(self._http.url, path, status, raw, dict)
        return "ok" if status == 200 else "requested"

    async def _call(self, method: str, path: str, shape: type[T], body: bytes = b"") -> T | None:
        """The answer; None if there is no such job."""
        async with self._turns:
            status, raw = await self._http.send(method, path, body, timeout_s=self._answer_s)
        return None if status == 404 else read_answer(self._http.url, path, status, raw, shape)


class RemoteNews:
    """Which jobs moved, by a long poll: one request for all who wait."""

    def __init__(self, http: PlaneHttp, *, answer_ms: int) -> None:
        self._http = http
        self._answer_s = answer_ms / 1000
        self._skipped: dict[str, str] = {}

    async def last(self) -> str:
        """The position of the newest step."""
        return (await self._ask("", 0)).after

    async def wait(self, *, after: str, wait_ms: int) -> list[JournalEvent]:
        """Steps after a position; waits for the first."""
        news = await self._ask(self._skipped.get(after, after), wait_ms)
        # The steps of other requesters are passed over: do not read them again.
        self._skipped = {} if news.moved else {after: news.after}
        return [
            JournalEvent(
                seq=news.after,
                contract=CONTRACT,
                queue="",
                job_id=each.job_id,
                type=each.type,
                ts_ms=0,
                to_state=each.status,
            )
            for each in news.moved
        ]

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    async def _ask(self, after: str, wait_ms: int) -> PlaneNews:
        path = f"/v1/plane/news?{urlencode({'after': after, 'wait_ms': wait_ms})}"
        timeout_s = self._answer_s + wait_ms / 1000
        status, raw = await self._http.send("GET", path, timeout_s=timeout_s)
        return read_answer(self._http.url, path, status, raw, PlaneNews)


def open_remote_ledger(url: QueueUrl) -> RemoteLedger:
    """The ledger of a plane at `plane+http://host:8470`; connects on first use."""
    http, options = open_http(url)
    return RemoteLedger(http, answer_ms=options.answer_ms)


def open_remote_news(url: QueueUrl) -> RemoteNews:
    """The news of a plane at `plane+http://host:8470`; connects on first use."""
    http, options = open_http(url)
    return RemoteNews(http, answer_ms=options.answer_ms)


def _path(job_id: str) -> str:
    return f"/v1/plane/jobs/{quote(job_id, safe='')}"


def _queue_path(name: str) -> str:
    return f"/api/queues/{quote(name, safe='')}"


def _refuse(what: str) -> NoReturn:
    raise UsageError(
        f"a plane over HTTP {what}: it has no route for that; open the plane at its database, "
        "plane+sqlite:// or plane+postgresql://",
        contract=CONTRACT,
    )


def _record(job: _Job) -> JobRecord:
    return JobRecord(
        job_id=job.job_id,
        contract=CONTRACT,
        queue=job.stream,
        task=job.task,
        state=job.status,
        payload=bytes(job.payload),
        result=_bytes(job.result),
        error=_bytes(job.error),
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        created_ms=job.created_ms,
        updated_ms=job.updated_ms,
        due_ms=job.due_ms,
        lease_until_ms=job.lease_until_ms,
        worker_id=job.worker_id,
        progress=_bytes(job.progress),
        priority=job.priority,
        gid=job.gid,
    )


def _found(job: _Found, queue: str) -> JobRecord:
    return JobRecord(
        job_id=job.job_id,
        contract=CONTRACT,
        queue=queue,
        task=job.task,
        state=job.own_state,
        payload=bytes(job.payload),
        result=_bytes(job.result),
        error=_bytes(job.error),
        progress=_bytes(job.progress),
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        created_ms=job.created_ms,
        updated_ms=job.updated_ms,
        due_ms=job.due_ms,
        lease_until_ms=job.lease_until_ms,
        priority=job.priority,
        worker_id=job.worker_id,
    )


def _bytes(raw: msgspec.Raw) -> bytes:
    """The JSON; b"" where there is none."""
    value = bytes(raw)
    return b"" if value == b"null" else value
