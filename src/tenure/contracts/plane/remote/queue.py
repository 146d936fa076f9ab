"""The queue of a plane over HTTP, and its schedules."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

import msgspec

from tenure.contracts.plane.model import CONTRACT, Claim, WorkerOptions, attempt_id_of
from tenure.contracts.plane.queue import PlaneQueue, anonymous
from tenure.contracts.plane.schedules import (
    NewPlaneSchedule,
    PlaneSchedule,
    PlaneSchedules,
    Unscheduled,
    schedule_of,
    view_of,
)
from tenure.contracts.plane.schemas import (
    BATCH_MAX,
    ChildrenResult,
    ClaimedJob,
    ClaimResults,
    HeartbeatResult,
    HeartbeatResults,
    ReportResults,
    SettleResult,
    SettleResults,
    SubmitResults,
)
from tenure.core.errors import (
    LeaseLost,
    ReplyLost,
    ServerError,
    StoreError,
    StoreUnreachable,
    UsageError,
)
from tenure.core.job import Children, NewJob, Schedule, Submitted
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome, Verdict, verdict_of
from tenure.core.registry import QueueUrl
from tenure.core.seam import Schedules, Upkeep
from tenure.egress import (
    Client,
    Disconnected,
    Limits,
    RequestTimedOut,
    TooLarge,
    Unguarded,
    Unreachable,
)
from tenure.store import resend

_SCHEDULES = "/v1/plane/schedules"
_CONNECT_MS = 5_000
_ANSWER_BYTES_MAX = 256 << 20
_ENVELOPE_BYTES = 4_096  # what a request holds besides its items, and an item besides its result
# The request itself is wrong, if the plane says so and not a proxy before it. Any other refusal may
# not happen again.
_USAGE = frozenset({400, 413, 422})
_NOT_EXECUTED = frozenset({"queue_full", "rate_limited", "draining"})
_UNAVAILABLE = frozenset({429, 502, 503, 504})

T = TypeVar("T")


class PlaneHttp:
    """Sends JSON to one plane. It never sends a request again: callers know what is safe."""

    def __init__(
        self, url: str, *, headers: Mapping[str, str], tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(url)
        if not parts.hostname:
            raise UsageError(f"{url!r} names no host; write plane+http://host:8470")
        netloc = parts.netloc.rpartition("@")[2]
        self.url = f"{parts.scheme}://{netloc}{parts.path.rstrip('/')}"
        self._headers = list({"Content-Type": "application/json", **headers}.items())
        self._client = Client(Unguarded(), tls=tls)

    async def send(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float
    ) -> tuple[int, bytes]:
        """The status and the body of the answer."""
        limits = Limits(_CONNECT_MS, int(timeout_s * 1000), _ANSWER_BYTES_MAX)
        try:
            answer = await self._client.send(
                method, self.url + path, headers=self._headers, body=body, limits=limits
            )
        except (RequestTimedOut, Disconnected, TooLarge) as error:
            raise ReplyLost(f"the plane gave no whole answer to {path}: {error}") from error
        except Unreachable as error:
            raise StoreUnreachable(f"the plane: {error}") from error
        if answer.truncated:
            raise ReplyLost(f"the plane's answer to {path} has over {_ANSWER_BYTES_MAX} bytes")
        return answer.status, answer.body

    async def close(self) -> None:
        """Close every connection."""
        await self._client.close()


class _RemotePlane:
    """A plane at a URL."""

    def __init__(
        self,
        http: PlaneHttp,
        *,
        worker_id: str,
        answer_ms: int,
        body_bytes_max: int,
        stream: str = "",
    ) -> None:
        self._http = http
        self._worker_id = worker_id
        self._answer_s = answer_ms / 1000
        self._bytes_max = body_bytes_max - _ENVELOPE_BYTES
        self.schedules: Schedules = _RemoteSchedules(self, stream)

    async def claim(self, claim: Claim) -> list[Lease]:
        """Take leases; the plane delays its answer while there are none."""
        body = {
            "worker_id": claim.worker_id,
            "streams": claim.streams,
            "max_wait_ms": claim.wait_ms,
            "max_jobs": claim.limit,
            "claim_id": claim.claim_id,
            "lost": claim.lost,
            "fresh": claim.fresh,
        }
        answer = await self._post("claim", body, ClaimResults, wait_ms=claim.wait_ms)
        return [_lease(job) for job in answer.jobs]

    async def extend(self, leases: Sequence[Lease]) -> list[Lease | LeaseLost]:
        """Keep leases alive; the plane writes only those that need it (`if_short`)."""
        answers: list[Lease | LeaseLost] = []
        for batch, items in self._batches(leases, _proof):
            body = {"worker_id": self._worker_id, "leases": items, "if_short": True}
            post = self._post("heartbeat", body, HeartbeatResults)
            answer = await resend.run_step(post, executed_before=bool(answers))
            answers += [
                _extended(lease, result)
                for lease, result in zip(batch, answer.results, strict=True)
            ]
        return answers

    async def report(self, reports: Sequence[Report]) -> list[LeaseLost | None]:
        """Store reports."""
        answers: list[LeaseLost | None] = []
        for batch, items in self._batches(reports, _report_item):
            body = {"worker_id": self._worker_id, "reports": items}
            post = self._post("report", body, ReportResults)
            answer = await resend.run_step(post, executed_before=bool(answers))
            answers += [
                None if result.ok else LeaseLost(report.lease.job_id, result.reason)
                for report, result in zip(batch, answer.results, strict=True)
            ]
        return answers

    async def settle(self, outcomes: Sequence[Outcome]) -> list[Verdict]:
        """End leases: successes by `complete`, all others by `fail`, at the same time."""
        numbered = [(at, self._sendable(outcome)) for at, outcome in enumerate(outcomes)]
        done = [each for each in numbered if each[1].kind == "complete"]
        rest = [each for each in numbered if each[1].kind != "complete"]
        verdicts: dict[int, Verdict] = {}
        calls = [self._end("complete", done, verdicts), self._end("fail", rest, verdicts)]
        for error in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        return [verdicts[at] for at in range(len(outcomes))]

    async def _end(
        self, verb: str, numbered: list[tuple[int, Outcome]], verdicts: dict[int, Verdict]
    ) -> None:
        for batch, items in self._batches(numbered, lambda each: _settle_item(each[1])):
            body = {"worker_id": self._worker_id, "jobs": items}
            post = self._post(verb, body, SettleResults)
            answer = await resend.run_step(post, executed_before=bool(verdicts))
            for (at, outcome), result in zip(batch, answer.results, strict=True):
                verdicts[at] = _verdict(outcome, result)

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs."""
        answers: dict[int, Submitted] = {}
        sent: list[tuple[int, dict[str, Any]]] = []
        for at, job in enumerate(jobs):
            try:
                sent.append((at, _new_job(job)))
            except UsageError as error:  # the other jobs are sent
                answers[at] = Submitted("", "invalid", str(error))
        stored: dict[int, Submitted] = {}
        for batch, items in self._batches(sent, lambda each: each[1]):
            post = self._post("/v1/plane/jobs", {"jobs": items}, SubmitResults)
            answer = await resend.run_step(post, executed_before=bool(stored))
            stored |= {at: each for (at, _), each in zip(batch, answer.results, strict=True)}
        answers |= stored
        return [answers[at] for at in range(len(jobs))]

    async def children(self, lease: Lease) -> Children:
        """The results of the jobs that a running job waited for."""
        body = {"worker_id": self._worker_id, **_proof(lease)}
        answer = await self._post("children", body, ChildrenResult)
        if not answer.ok:
            raise LeaseLost(lease.job_id, answer.reason)
        return Children(results=answer.results)

    async def upkeep(self, worker_id: str, *, slots: int = 0) -> Upkeep:
        """Ask the plane for a round of upkeep."""
        return await self._post("upkeep", {"worker_id": worker_id, "slots": slots}, Upkeep)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()

    def _batches(
        self, items: Sequence[T], write: Callable[[T], dict[str, Any]]
    ) -> Iterator[tuple[list[T], list[msgspec.Raw]]]:
        """Batches that fit into one request, and their items as JSON."""
        batch: list[T] = []
        written: list[msgspec.Raw] = []
        size = 0
        for item in items:
            raw = msgspec.json.encode(write(item))
            size += len(raw) + 1
            if batch and (len(batch) >= BATCH_MAX or size > self._bytes_max):
                yield batch, written
                batch, written, size = [], [], len(raw) + 1
            batch.append(item)
            written.append(msgspec.Raw(raw))
        if batch:
            yield batch, written

    def _sendable(self, outcome: Outcome) -> Outcome:
        """The outcome. A result too large for a request would be sent for ever, so it is buried."""
        most = self._bytes_max - _ENVELOPE_BYTES
        if len(outcome.result) <= most:
            return outcome
        message = f"the result has {len(outcome.result)} bytes, more than {most} (body_bytes_max)"
        failure = Failure(code="result_too_large", message=message, retryable=False)
        return Outcome(outcome.lease, "bury", failure=failure)

    async def _post(self, verb: str, body: Any, answer: type[T], *, wait_ms: int = 0) -> T:
        path = verb if verb.startswith("/") else f"/internal/worker/{verb}"
        return await self.call("POST", path, answer, msgspec.json.encode(body), wait_ms=wait_ms)

    async def call(
        self, method: str, path: str, answer: type[T], body: bytes = b"", *, wait_ms: int = 0
    ) -> T:
        """Send one request; the body of its answer."""
        timeout_s = self._answer_s + wait_ms / 1000
        status, raw = await self._http.send(method, path, body, timeout_s=timeout_s)
        return read_answer(self._http.url, path, status, raw, answer)


class _RemoteSchedules:
    """The schedules of a plane, which stores their jobs itself, in `stream` if they name none."""

    def __init__(self, plane: _RemotePlane, stream: str) -> None:
        self._plane = plane
        self._stream = stream

    async def put(self, schedule: Schedule) -> Schedule:
        """Store a schedule under its name, or change it; as it is now."""
        view = view_of(schedule)
        fields = NewPlaneSchedule.__struct_fields__
        given = {name: getattr(view, name) for name in fields}
        body = msgspec.json.encode(given | {"stream": view.stream or self._stream})
        path = f"{_SCHEDULES}/{quote(schedule.name, safe='')}"
        return schedule_of(await self._plane.call("PUT", path, PlaneSchedule, body))

    async def list(self) -> Sequence[Schedule]:
        """All schedules, the next one due first."""
        answer = await self._plane.call("GET", _SCHEDULES, PlaneSchedules)
        return [schedule_of(each) for each in answer.schedules]

    async def remove(self, name: str) -> bool:
        """Remove a schedule; False if there is none."""
        path = f"{_SCHEDULES}/{quote(name, safe='')}"
        return (await self._plane.call("DELETE", path, Unscheduled)).removed

    async def enqueue_due(
        self, submit: Callable[[Sequence[NewJob]], Awaitable[Sequence[Submitted]]], ahead_ms: int
    ) -> Sequence[Schedule]:
        """Nothing to do: the plane does it with its upkeep."""
        return ()


def open_remote(url: QueueUrl, *, worker_id: str = "") -> PlaneQueue:
    """The queue behind `plane+http://host:8470?streams=...`; connects on first use."""
    http, options = open_http(url)
    worker_id = worker_id or anonymous()
    remote = _RemotePlane(
        http,
        worker_id=worker_id,
        answer_ms=options.answer_ms,
        body_bytes_max=options.body_bytes_max,
        stream=next(iter(options.names), ""),
    )
    return PlaneQueue(remote, streams=options.names, worker_id=worker_id)


def open_http(url: QueueUrl) -> tuple[PlaneHttp, WorkerOptions]:
    """The plane behind a URL, and the options of that."""
    options, store = url.read(WorkerOptions)
    rest = store.partition("?")[2]
    if rest:
        raise UsageError(f"queue URL {url.safe}: unknown option {rest!r}", contract=CONTRACT)
    key = _key(store, options)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return PlaneHttp(store, headers=headers, tls=_tls(store, options)), options


def read_answer(url: str, path: str, status: int, raw: bytes, answer: type[T]) -> T:
    """The body of an answer; raises the error of a refusal."""
    if status not in (200, 202):
        raise _refusal(url, path, status, raw)
    try:
        return msgspec.json.decode(raw, type=answer)
    except msgspec.DecodeError as error:
        raise ServerError(f"{url} answered {path} unreadably: {error}") from error


def _key(store: str, options: WorkerOptions) -> str:
    if options.key_file:
        try:
            return Path(options.key_file).read_text(encoding="utf-8").split("\n", 1)[0].strip()
        except OSError as error:
            raise UsageError(f"key_file {options.key_file}: {error.strerror}") from None
    return unquote(urlsplit(store).password or "")


def _tls(store: str, options: WorkerOptions) -> ssl.SSLContext | None:
    if not store.startswith("https"):
        if options.cafile or options.certfile:
            raise UsageError("cafile and certfile are for plane+https", contract=CONTRACT)
        return None
    try:
        context = ssl.create_default_context(cafile=options.cafile or None)
        if options.certfile:
            context.load_cert_chain(options.certfile, options.keyfile or None)
    except OSError as error:
        raise UsageError(f"the certificates cannot be used: {error}", contract=CONTRACT) from None
    return context


def _refusal(url: str, path: str, status: int, raw: bytes) -> StoreError | UsageError:
    try:
        problem = msgspec.json.decode(raw)
        detail, code = problem.get("detail", ""), problem.get("code", "")
        ours = bool(code) and str(problem.get("type")).endswith(f"/docs#{code}")
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError):
        detail, code, ours = raw[:200].decode(errors="replace"), "", False
    kind: type[StoreError | UsageError] = ServerError
    if ours and status in _USAGE:
        kind = UsageError
    elif status in _UNAVAILABLE and code != "store_refused":
        # A 429 comes before the request is executed; 502 to 504 do not say how far it got.
        not_executed = status == 429 or (ours and code in _NOT_EXECUTED)
        kind = StoreUnreachable if not_executed else ReplyLost
    message = f"{url} answered {path} with {status}: {detail}"
    return kind(message, contract=CONTRACT, operation=path, reply=raw)


def _proof(lease: Lease) -> dict[str, Any]:
    return {
        "job_id": lease.job_id,
        "attempt_id": attempt_id_of(lease.job_id, lease.fence),
        "lease_token": lease.token,
        "stream": lease.queue,
    }


def _settle_item(outcome: Outcome) -> dict[str, Any]:
    body = _proof(outcome.lease)
    body["message_id"] = outcome.lease.handle
    if outcome.kind == "complete":
        return {**body, "result": msgspec.Raw(outcome.result)}
    body |= {"kind": outcome.kind, "delay_ms": outcome.delay_ms}
    if outcome.failure is not None:
        body["error"] = outcome.failure
    return body


def _report_item(report: Report) -> dict[str, Any]:
    body = _proof(report.lease)
    body |= {"type": report.type, "step": report.step, "data": msgspec.Raw(report.data)}
    if report.progress:
        body["progress"] = msgspec.Raw(report.progress)
    return body


def _new_job(job: NewJob) -> dict[str, Any]:
    try:
        msgspec.json.decode(job.payload, type=msgspec.Raw)
        job.payload.decode()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the payload is not JSON: {error}") from None
    options = dict(job.options)
    stream = options.pop("stream", "")
    if options:
        raise UsageError(f"no such job option: {', '.join(sorted(options))}; there is stream")
    fields = {
        name: getattr(job, name)
        for name in (
            *("task", "job_id", "idempotency_key", "requester", "priority", "delay_ms"),
            *("max_attempts", "ttl_ms", "gid", "trace"),
        )
    }
    return {**fields, "payload": msgspec.Raw(job.payload), "stream": stream}


def _lease(job: ClaimedJob) -> Lease:
    return Lease(
        job_id=job.job_id,
        queue=job.stream.name,
        task=job.task,
        payload=bytes(job.payload),
        attempt=job.attempt,
        max_attempts=job.max_attempts,
        fence=job.fence,
        token=job.lease_token,
        lease_until_ms=job.lease_expires_at_ms,
        lease_ms=job.lease_remaining_ms,
        created_ms=job.created_ms,
        handle=job.stream.message_id,
        gid=job.gid,
        priority=job.priority,
        trace=job.trace,
        ttl_ms=job.ttl_ms,
    )


def _extended(lease: Lease, answer: HeartbeatResult) -> Lease | LeaseLost:
    if not answer.ok:
        return LeaseLost(lease.job_id, answer.reason)
    return msgspec.structs.replace(
        lease,
        lease_until_ms=answer.lease_expires_at_ms,
        lease_ms=answer.lease_remaining_ms,
        cancel_requested=answer.cancel_requested,
    )


def _verdict(outcome: Outcome, answer: SettleResult) -> Verdict:
    if not answer.ok:
        return LeaseLost(outcome.lease.job_id, answer.reason)
    return verdict_of(answer.verdict, answer.due_ms)
