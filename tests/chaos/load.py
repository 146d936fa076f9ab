"""The load: jobs that are sent until they are acknowledged, and log B of what their senders saw.

Every job has a key of its own and is sent again under that key (its job id, or its Idempotency-Key
over HTTP) after each lost answer. Log B has a line per call: invoke, and then ok, fail (nothing was
executed) or info (no answer: it may or may not have been executed).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol
from uuid import UUID

import msgspec

from tenure.core.encoding import short_hash
from tenure.core.errors import StoreError, StoreUnreachable
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tests.chaos.effects import now_ms
from tests.chaos.posting import AnswerLost, NotSent, Poster
from tests.chaos.verdict import Observation

Phase = Literal["invoke", "ok", "fail", "info"]
AGAIN_S = (0.02, 0.2)


@dataclass(frozen=True)
class Wanted:
    """A job that shall be done. `key` is its id, or its idempotency key over HTTP."""

    key: str
    task: str
    payload: dict[str, Any]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def encoded(self) -> bytes:
        """The payload as it travels."""
        return msgspec.json.encode(self.payload)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One line of log B."""

    phase: Phase
    via: str
    key: str
    payload_h: str
    ms: int
    job_id: str = ""
    text: str = ""


class Refusal(Exception):
    """A submit was refused for good, which no fault explains."""


class Channel(Protocol):
    """A way to hand in jobs."""

    via: str

    async def send(self, jobs: Sequence[Wanted]) -> list[str | None]:
        """Per job its id, or None when it has to be sent again; Lost when there was no answer."""

    async def close(self) -> None:
        """Let go of connections."""


class Lost(Exception):
    """No answer; `phase` says whether the call may have been executed."""

    def __init__(self, phase: Phase, text: str) -> None:
        super().__init__(text)
        self.phase: Phase = phase


class LibraryChannel:
    """Through the seam, straight into the store."""

    via = "library"

    def __init__(self, url: str) -> None:
        self._queue = open_queue(url, worker_id="chaos-load")

    async def send(self, jobs: Sequence[Wanted]) -> list[str | None]:
        new = [
            NewJob(task=job.task, payload=job.encoded, job_id=job.key, **job.options)
            for job in jobs
        ]
        try:
            answers = await self._queue.submit(new)
        except StoreUnreachable as error:
            raise Lost("fail", str(error)) from None
        except StoreError as error:
            raise Lost("info", str(error)) from None
        for answer in answers:
            if answer.status in ("conflict", "invalid"):
                raise Refusal(f"{answer.status}: {answer.reason}")
        return [answer.job_id if answer.accepted else None for answer in answers]

    async def close(self) -> None:
        await self._queue.close()


class HttpChannel:
    """Through the gateway, with an Idempotency-Key."""

    via = "http"

    def __init__(self, port: int, path: str) -> None:
        self._poster = Poster(port)
        self._path = path

    async def send(self, jobs: Sequence[Wanted]) -> list[str | None]:
        return [await self._send(job) for job in jobs]

    async def _send(self, job: Wanted) -> str | None:
        body = msgspec.json.encode({"task": job.task, "payload": job.payload, **job.options})
        try:
            status, answer = await self._poster.post(self._path, body, {"Idempotency-Key": job.key})
        except NotSent as error:
            raise Lost("fail", str(error)) from None
        except AnswerLost as error:
            raise Lost("info", str(error)) from None
        if status == 202:
            return str(answer["job_id"])
        if status == 429:
            return None
        if status >= 500:
            raise Lost("info", f"{status} {answer}")
        raise Refusal(f"{status} {answer}")

    async def close(self) -> None:
        self._poster.close()


class Load:
    """Sends jobs through channels until each is acknowledged. `acked` maps keys to job ids."""

    def __init__(self, log: Path, rng: Random) -> None:
        self._log = log.open("ab")
        self._rng = rng
        self.wanted: dict[str, Wanted] = {}
        self.acked: dict[str, str] = {}
        self.observations: list[Observation] = []
        self.http_ok_ms: list[int] = []
        self.phases: dict[Phase, int] = {"invoke": 0, "ok": 0, "fail": 0, "info": 0}

    async def feed(
        self,
        channel: Channel,
        jobs: Iterable[Wanted],
        *,
        batch: int = 1,
        pause_s: float = 0.0,
        ahead: Callable[[], bool] = lambda: False,
    ) -> None:
        """Send all, at most `batch` at a time, waiting while the load is `ahead` of the work."""
        source = iter(jobs)
        try:
            while chunk := _some(source, self._rng.randint(1, batch)):
                await self._deliver(channel, chunk)
                if pause_s:
                    await asyncio.sleep(pause_s)
                while ahead():
                    await asyncio.sleep(AGAIN_S[0])
        finally:
            await channel.close()

    async def _deliver(self, channel: Channel, chunk: list[Wanted]) -> None:
        for job in chunk:
            self.wanted[job.key] = job
        while chunk:
            begin_ms = now_ms()
            self._note("invoke", channel, chunk)
            try:
                answers = await channel.send(chunk)
            except Lost as lost:
                self._note(lost.phase, channel, chunk, text=str(lost))
                self._observe(chunk, [""] * len(chunk), lost.phase, begin_ms)
                await asyncio.sleep(self._rng.uniform(*AGAIN_S))
                continue
            done = [(job, job_id) for job, job_id in zip(chunk, answers, strict=True) if job_id]
            self._acknowledged(channel, done, begin_ms)
            chunk = [job for job, job_id in zip(chunk, answers, strict=True) if not job_id]
            if chunk:  # the queue was full
                await asyncio.sleep(self._rng.uniform(*AGAIN_S))

    def _acknowledged(
        self, channel: Channel, done: list[tuple[Wanted, str]], begin_ms: int
    ) -> None:
        jobs, job_ids = [job for job, _ in done], [job_id for _, job_id in done]
        for job, job_id in done:
            self.acked[job.key] = job_id
        if channel.via == "http":
            self.http_ok_ms.append(now_ms())
        self._note("ok", channel, jobs, job_ids=job_ids)
        self._observe(jobs, job_ids, "ok", begin_ms)

    def _observe(self, jobs: list[Wanted], job_ids: list[str], phase: Phase, begin_ms: int) -> None:
        assert phase != "invoke"
        for _, job_id in zip(jobs, job_ids, strict=True):
            self.observations.append(
                Observation(
                    op="submit", result=phase, begin_ms=begin_ms, end_ms=now_ms(), job_id=job_id
                )
            )

    def _note(
        self,
        phase: Phase,
        channel: Channel,
        jobs: list[Wanted],
        *,
        job_ids: Sequence[str] = (),
        text: str = "",
    ) -> None:
        self.phases[phase] += len(jobs)
        for position, job in enumerate(jobs):
            line = Line(
                phase=phase,
                via=channel.via,
                key=job.key,
                payload_h=short_hash(job.encoded),
                ms=now_ms(),
                job_id=job_ids[position] if job_ids else "",
                text=text,
            )
            self._log.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        """The log is on disk."""
        self._log.close()


def key_of(rng: Random) -> str:
    """A job id that the seed decides."""
    return str(UUID(int=rng.getrandbits(128), version=4))


def _some(source: Any, count: int) -> list[Wanted]:
    return [job for _, job in zip(range(count), source, strict=False)]
