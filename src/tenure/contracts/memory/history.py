"""The journal of one memory queue: appended in the same step that changes the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from tenure.contracts.memory.stored import CONTRACT, StoredJob
from tenure.core.event import JournalEvent
from tenure.core.idempotency import short_hash
from tenure.core.job import JobEvent
from tenure.core.lease import Report
from tenure.core.state import MEMORY


class History:
    """Events in store order by a counting position, and how often each type happened."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self._events: list[JournalEvent] = []
        self._dropped = 0
        self.totals: Counter[str] = Counter()

    def step(
        self, job: StoredJob, kind: str, to_state: str, *, reopening: bool = False, **left: Any
    ) -> None:
        """Move a job: check the table, write the event, then change the job's own fields.

        `left` holds what the step leaves different: fields of the job by their names, or fields
        that only the event has. `by` is the token that whoever asked for the step has shown.
        """
        if to_state != job.state:
            MEMORY.require(job.state, to_state, reopening=reopening)
        now_ms, job.ver = self._now_ms(), job.ver + 1
        before = job.state, job.fence, job.lease_until_ms, job.token, job.worker_id
        only_event = {name: left.pop(name) for name in _ONLY_EVENT & left.keys()}
        for name, value in left.items():
            setattr(job, name, value)
        job.state, job.updated_ms = to_state, now_ms
        self._append(job, kind, before, now_ms, only_event)

    def opened(self, job: StoredJob) -> None:
        """The first event of a job: it came from nowhere into the machine's initial state."""
        (job.state,) = MEMORY.initial
        job.ver, job.updated_ms = 1, job.created_ms
        left = {"payload_h": short_hash(job.payload)}
        self._append(job, "submit", ("", 0, 0, "", ""), job.created_ms, left)

    def told(self, job: StoredJob, report: Report) -> None:
        """News from the holder: an event of the job's own stream, and progress if any."""
        left: dict[str, Any] = {"progress": report.progress or job.progress, "data": report.type}
        self.step(job, "report", job.state, by=report.lease.token, **left)
        job.events.append(
            JobEvent(
                event_id=str(len(self)),
                type=report.type,
                ts_ms=job.updated_ms,
                step=report.step,
                data=report.data,
            )
        )

    def removed(self, job: StoredJob, why: str) -> None:
        """The last event of a job: it went from its state to nowhere."""
        job.ver += 1
        before, job.state = (job.state, job.fence, 0, "", ""), ""
        self._append(job, "remove", before, self._now_ms(), {"data": why})

    def rejected(self, job: StoredJob | None, job_id: str, queue: str, **told: Any) -> None:
        """A stale holder was told so: an event with `ver` 0 that changes nothing."""
        seen: dict[str, Any] = {}
        if job is not None:
            seen = {"from_state": job.state, "to_state": job.state, "task": job.task}
            seen |= {"fence": job.fence, "prev_fence": job.fence, "attempt": job.attempt}
        self._write(job_id=job_id, queue=queue, type="reject", ts_ms=self._now_ms(), **seen, **told)

    def paused(self, queue: str, *, paused: bool) -> None:
        """The queue stopped or began again to hand out leases."""
        kind = "pause" if paused else "resume"
        self._write(job_id="", queue=queue, type=kind, ts_ms=self._now_ms())

    def read(self, after: str, limit: int) -> list[JournalEvent]:
        """Events after a position; a position that was trimmed away continues at the oldest."""
        start = max(int(after or 0) - self._dropped, 0)
        return self._events[start : start + max(limit, 0)]

    def trim(self, events_max: int) -> int:
        """Forget the oldest events beyond the limit."""
        extra = max(len(self._events) - events_max, 0)
        if extra:
            del self._events[:extra]
            self._dropped += extra
        return extra

    def __len__(self) -> int:
        return self._dropped + len(self._events)

    def _append(
        self,
        job: StoredJob,
        kind: str,
        before: tuple[str, int, int, str, str],
        ts_ms: int,
        left: dict[str, Any],
    ) -> None:
        from_state, prev_fence, prev_lease_until_ms, prev_token, prev_worker_id = before
        # A step under a lease names its holder, another nobody.
        token = left.pop("by", "") or job.token or prev_token
        self._write(
            queue=job.queue,
            job_id=job.job_id,
            task=job.task,
            type=kind,
            ts_ms=ts_ms,
            ver=job.ver,
            from_state=from_state,
            to_state=job.state,
            attempt=job.attempt,
            fence=job.fence,
            prev_fence=prev_fence,
            token_h=short_hash(token.encode()) if token else "",
            worker_id=(job.worker_id or prev_worker_id) if token else "",
            lease_until_ms=job.lease_until_ms,
            prev_lease_until_ms=prev_lease_until_ms,
            gid=job.gid,
            priority=job.priority,
            due_ms=job.due_ms,
            max_attempts=job.max_attempts,
            **left,
        )
        if kind not in ("extend", "report", "remove"):
            self._tell(job, kind, ts_ms)

    def _write(self, **fields: Any) -> None:
        self.totals[fields["type"]] += 1
        self._events.append(JournalEvent(seq=str(len(self) + 1), contract=CONTRACT, **fields))

    def _tell(self, job: StoredJob, kind: str, ts_ms: int) -> None:
        """The job's own stream says its state after each step, and by which step."""
        data = b'{"attempt":%d}' % job.attempt
        job.events.append(
            JobEvent(event_id=str(len(self)), type=job.state, ts_ms=ts_ms, step=kind, data=data)
        )


_ONLY_EVENT = frozenset({"by", "error_code", "result_h", "data"})
