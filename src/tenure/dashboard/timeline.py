"""A job's story as bars: one line per attempt, with the time it waited, ran, and rested after.

Made from the job's own events, whose words `kinds.py` knows; it needs no contract. What is still
going on ends at `now_ms`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tenure.core.job import JobEvent, JobRecord
from tenure.dashboard.kinds import Kind, event_kind, kind_of
from tenure.dashboard.reading import decoded

Phase = Literal["wait", "run", "backoff"]
_SHOWN_MAX = 200
_MS_DIGITS = 15
_ENDS: tuple[Kind, ...] = ("done", "failed", "cancelled")


class Segment(msgspec.Struct, frozen=True):
    """One stretch of time; `open` when it is still going on."""

    phase: Phase
    from_ms: int
    to_ms: int
    open: bool = False


class Attempt(msgspec.Struct, frozen=True):
    """One attempt: what came before it, the run, and how it ended ("" while it runs)."""

    number: int
    segments: tuple[Segment, ...]
    end: Kind | Literal["retry", ""] = ""
    worker: str = ""


class Timeline(msgspec.Struct, frozen=True):
    """The last attempts of a job, and the time they span; `earlier` ones are counted.

    `partial` when the first events are gone.
    """

    attempts: tuple[Attempt, ...]
    from_ms: int
    to_ms: int
    partial: bool = False
    earlier: int = 0

    @property
    def told(self) -> int:
        """How many attempts the events tell of."""
        return self.earlier + len(self.attempts)


def timeline(job: JobRecord, events: Sequence[JobEvent], *, now_ms: int) -> Timeline:
    """Read the story out of the events; without any, out of the record."""
    builder = _Builder(job)
    for event in events:
        # A job that will be tried again may rest in a state that elsewhere is an end.
        kind = "waiting" if event.step == "retry" else event_kind(event.type)
        if kind is not None:
            builder.step(kind, event)
    return builder.finish(now_ms)


class _Builder:
    """Goes through the events once."""

    def __init__(self, job: JobRecord) -> None:
        self._job = job
        self._attempts: list[Attempt] = []
        self._segments: list[Segment] = []
        self._phase: Phase = "wait"
        self._since_ms = job.created_ms
        self._worker = ""
        self._runs = 0
        self._heard = False
        self._ended = False

    def step(self, kind: Kind, event: JobEvent) -> None:
        """The job became something else."""
        ts_ms = event.ts_ms or self._since_ms
        self._heard = True
        if kind == "running":
            if self._phase == "run":
                return  # a stage within the same attempt
            self._close(ts_ms)
            self._phase = "run"
            self._worker = _worker_in(event)
        elif self._phase == "run":
            self._end_attempt(ts_ms, kind, event)
        elif kind in _ENDS:
            if not self._ended:  # a failure that is decided a moment later is one end
                self._close(ts_ms)
            self._ended = True
        elif self._ended:  # an operator sent it back
            self._phase, self._since_ms, self._ended = "wait", ts_ms, False

    def finish(self, now_ms: int) -> Timeline:
        """The whole, up to now if the job is not over."""
        over = kind_of(self._job.state) in _ENDS
        until_ms = self._job.updated_ms if over and self._job.updated_ms else now_ms
        if not over:
            self._close(max(until_ms, self._since_ms), still=True)
        elif self._phase == "run" and not self._ended:  # its end was not told, or is no longer kept
            self._close(max(until_ms, self._since_ms))
        if self._segments:
            end: Any = kind_of(self._job.state) if over else ""
            self._attempts.append(self._attempt(end))
        shown = self._attempts[-_SHOWN_MAX:]
        spans = [segment for attempt in shown for segment in attempt.segments]
        first = min((segment.from_ms for segment in spans), default=self._job.created_ms)
        last = max((segment.to_ms for segment in spans), default=until_ms)
        earlier = len(self._attempts) - len(shown)
        return Timeline(tuple(shown), first, max(last, first + 1), not self._heard, earlier)

    def _end_attempt(self, ts_ms: int, kind: Kind, event: JobEvent) -> None:
        self._close(ts_ms)
        if kind in _ENDS:
            self._attempts.append(self._attempt(kind))
            self._ended, self._phase, self._since_ms = True, "wait", ts_ms
            return
        self._attempts.append(self._attempt("retry"))
        due_ms = _due_in(event)
        if due_ms > ts_ms:
            self._segments.append(Segment("backoff", ts_ms, due_ms))
            ts_ms = due_ms
        self._phase, self._since_ms = "wait", ts_ms

    def _close(self, ts_ms: int, *, still: bool = False) -> None:
        if self._segments and self._segments[-1].phase == "backoff":
            backoff = self._segments[-1]
            if ts_ms < backoff.to_ms:  # brought forward, or still resting
                self._segments[-1] = Segment("backoff", backoff.from_ms, ts_ms, still)
                self._since_ms = ts_ms
                return
        if ts_ms > self._since_ms or self._phase == "run":
            self._segments.append(Segment(self._phase, self._since_ms, ts_ms, still))
        self._since_ms = ts_ms

    def _attempt(self, end: Any) -> Attempt:
        self._runs += any(segment.phase == "run" for segment in self._segments)
        made = Attempt(self._runs, tuple(self._segments), end, self._worker)
        self._segments, self._worker = [], ""
        return made


def _worker_in(event: JobEvent) -> str:
    data = decoded(event.data)
    if not isinstance(data, dict):
        return ""
    return str(data.get("worker") or data.get("workerId") or data.get("worker_id") or "")


def _due_in(event: JobEvent) -> int:
    data = decoded(event.data)
    if not isinstance(data, dict):
        return 0
    for key in ("due_ms", "delay", "retry_at_ms"):
        text = str(data.get(key, ""))
        if text.isdecimal() and len(text) <= _MS_DIGITS and int(text) > event.ts_ms:
            return int(text)
    return 0
