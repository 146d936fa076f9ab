"""Reading and steering the jobs of this contract, and its journal."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from tenure.contracts.streams.options import CONTRACT, GROUP, QUEUE, Options, keys
from tenure.contracts.streams.queue import SCRIPTS
from tenure.core.errors import ServerError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.journal import StreamFormat
from tenure.core.seam import (
    PAGE_BYTES,
    READ_STEP,
    Counts,
    LedgerFeatures,
    Page,
    Query,
    WorkerBeat,
    first_page,
    is_full,
    weight,
)
from tenure.store.journal import HEAD, Lines, StreamJournal
from tenure.store.redis import Arg, Redis
from tenure.store.redis_connection import is_wrong_type
from tenure.store.redis_queue import (
    WORKER_ALIVE_MS,
    check_query,
    clock_ms,
    event_of,
    fields_of,
    in_batches,
    index_after,
    number,
    read_all,
    read_hashes,
)

_STATES = ("queued", "running", "done", "error", "canceled")
_CURSOR = re.compile(r"[0-9]{1,18}:.*", re.DOTALL)
# One call of `find` looks at no more jobs than this; a rarer state is found page by page.
_SCAN_MAX = 5_000
_FOREIGN_SEEN_MS = 600_000
_INTERRUPT_MS = 60_000
_JOURNAL_FIELDS = (*HEAD, "result_h", "payload_h", "error_code", "due_ms", "data")


class StreamsJournal(StreamJournal):
    """The history of the queue: the stream `jobs:journal`, written by the scripts."""

    def __init__(self, redis: Redis, options: Options) -> None:
        lines = Lines(_JOURNAL_FIELDS, contract=CONTRACT, queue=QUEUE)
        super().__init__(redis, keys(options.namespace)[1], lines)


def tape(store: str, options: Options) -> StreamFormat:
    """The same stream for bulk readers; it is trimmed only behind what they captured."""
    all_keys = keys(options.namespace)
    return StreamFormat(
        store=store,
        key=all_keys[1],
        contract=CONTRACT,
        queue=QUEUE,
        fields=_JOURNAL_FIELDS,
        captured=(all_keys[4], "captured"),
    )


class StreamsLedger:
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.namespace)
        self._interrupts = f"{options.namespace}jobs:interrupt:{secrets.token_hex(6)}"
        self._interrupted: Arg = "0-0"

    @property
    def features(self) -> LedgerFeatures:
        """What it has beyond the seam."""
        return LedgerFeatures(unfinished=self.unfinished, changes=self.changes, waiter=self)

    async def get(self, job_id: str) -> JobRecord | None:
        """The job's hash, or None when there is none (any more).

        What is there but is no hash is a job that ended in `error` with code `unreadable`.
        """
        (flat,) = await self._redis.pipeline([("HGETALL", self._job_key(job_id))])
        return _record(job_id, flat) if flat else None

    async def find(self, query: Query, *, requester: str | None = None) -> Page:
        """Jobs by creation time, newest first; those of one requester where it is given.

        `after` is `created_ms:job_id` of the last one found. Where the search stops at another job,
        it does so between two milliseconds and `after` is `created_ms:`: the jobs that were passed
        over may be other requesters', so their ids are not told.
        """
        check_query(query, _STATES, _CURSOR, CONTRACT)
        found: list[JobRecord] = []
        after, scanned, read, last_ms = query.after, 0, 0, -1
        while step := await index_after(self._redis, self._keys[6], after):
            async for created, job_id, flat in read_hashes(self._redis, self._job_key(""), step):
                if (scanned >= _SCAN_MAX or read >= PAGE_BYTES) and created != last_ms:
                    return Page(found, f"{last_ms}:")
                after, last_ms = f"{created}:{job_id}", created
                scanned += 1
                record = _record(job_id, flat) if flat else None
                read += weight(record) if record else 0
                if record and _matches(record, query, requester):
                    found.append(record)
                    if len(found) >= query.limit or read >= PAGE_BYTES:
                        return Page(found, after)
        return Page(found)

    async def counts(self) -> Counts:
        """Depth by state now, and totals since the queue exists."""
        stream, _, delayed, _, _, stats, _, paused, workers = self._keys
        replies = await self._redis.pipeline(
            [
                ("TIME",),
                ("XLEN", stream),
                ("XPENDING", stream, GROUP),
                ("ZCARD", delayed),
                ("HGETALL", stats),
                ("GET", paused),
                ("XINFO", "GROUPS", stream),
                ("HVALS", workers),
            ]
        )
        # A key that holds another type counts for nothing; the next claim moves it away.
        clock, length, pending, waiting_for_time, totals, paused_since, groups, beats = (
            None if isinstance(reply, ServerError) else reply for reply in replies
        )
        length, running = length or 0, int(pending[0]) if pending else 0
        names = fields_of(totals)
        now = clock_ms(clock or (0, 0))
        undelivered, oldest = await self._undelivered(groups, length, running, now)
        return Counts(
            states={
                "queued": undelivered + (waiting_for_time or 0),
                "running": running,
                **{state: number(names.get(state)) for state in _STATES[2:]},
            },
            totals={name: number(value) for name, value in names.items()},
            paused=bool(paused_since and paused_since.isdigit()),
            workers=sum(
                abs(now - number(beat.split(b" ")[0])) < WORKER_ALIVE_MS for beat in beats or ()
            ),
            oldest_waiting_ms=oldest,
        )

    async def unfinished(self, requester: str, most: int) -> int:
        """How many jobs of a requester have not ended; all jobs where those are less than `most`.

        Of many jobs it is an estimate, by some of them.
        """
        return int(await self._run("unfinished", requester, most))

    async def workers(self) -> list[WorkerBeat]:
        """Workers that claimed lately, also in vain."""
        clock, flat = await read_all(self._redis, [("TIME",), ("HGETALL", self._keys[8])])
        oldest = clock_ms(clock) - WORKER_ALIVE_MS
        beats = [_beat(worker, *words.split(b" ")) for worker, words in fields_of(flat).items()]
        return [beat for beat in beats if beat.last_ms > oldest]

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """The job's own event stream after a stream id."""
        start = f"({after}" if after else "-"
        key = f"{self._job_key(job_id)}:events"
        events: list[JobEvent] = []
        while not is_full(events, limit):
            count = min(READ_STEP, limit - len(events))
            step = _events(await self._redis.call("XRANGE", key, start, "+", "COUNT", count))
            events += step
            if len(step) < count:
                break
            start = f"({step[-1].event_id}"
        return first_page(events, limit)

    async def changes(self, cursors: Mapping[str, str]) -> dict[str, list[JobEvent]]:
        """What is new in the event streams of many jobs, each after its cursor; never blocks."""
        if not cursors:
            return {}
        names, after = self._positions(cursors)
        reply = await self._redis.call("XREAD", "COUNT", 1000, "STREAMS", *names, *after)
        return self._by_job(reply or ())

    async def wait_changes(
        self, cursors: Mapping[str, str], *, wait_ms: int
    ) -> dict[str, list[JobEvent]]:
        """Like `changes`, but waits for the first event, or until `interrupt`."""
        names, after = self._positions(cursors)
        streams = (self._interrupts, *names, self._interrupted, *after)
        reply = await self._redis.block(
            "XREAD", "COUNT", 1000, "BLOCK", wait_ms, "STREAMS", *streams, wait_ms=wait_ms
        )
        found = reply or []
        if found and found[0][0].decode() == self._interrupts:
            self._interrupted = found.pop(0)[1][-1][0]
        return self._by_job(found)

    async def interrupt(self) -> None:
        """End the wait of `wait_changes`: an entry in a stream that it reads as well."""
        await self._redis.pipeline(
            [
                ("XADD", self._interrupts, "MAXLEN", 1, "*", "i", 1),
                ("PEXPIRE", self._interrupts, _INTERRUPT_MS),
            ]
        )

    async def has_foreign_workers(self) -> bool:
        """Whether the group has consumers that our workers' table does not name."""
        consumers, known = await self._redis.pipeline(
            [("XINFO", "CONSUMERS", self._keys[0], GROUP), ("HKEYS", self._keys[8])]
        )
        if isinstance(consumers, ServerError) or isinstance(known, ServerError):
            return False
        return any(
            one["name"] not in known and (one["pending"] or one["idle"] < _FOREIGN_SEEN_MS)
            for one in map(fields_of, consumers)
        )

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._run("pause", "pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._run("pause", "resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back; per id "ok", "missing" or the state that forbids it."""
        return await self._steer("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", or its end."""
        return await self._steer("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing", or "running"."""
        return await self._steer("remove", job_ids)

    async def probe(self) -> None:
        """Raise `StoreError` where the server takes no writes."""
        await self._redis.call("SET", f"{self._options.namespace}jobs:probe", "", "PX", 1)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _positions(self, cursors: Mapping[str, str]) -> tuple[list[Arg], list[Arg]]:
        names: list[Arg] = [f"{self._job_key(job_id)}:events" for job_id in cursors]
        return names, [cursor or "0-0" for cursor in cursors.values()]

    def _by_job(self, reply: Any) -> dict[str, list[JobEvent]]:
        skip = len(self._options.namespace) + len("job:")
        return {key.decode()[skip : -len(":events")]: _events(entries) for key, entries in reply}

    def _job_key(self, job_id: str) -> str:
        return f"{self._options.namespace}job:{job_id}"

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.namespace, *args))

    async def _steer(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        async def send(batch: Sequence[str]) -> list[str]:
            return [reply.decode() for reply in await self._run("steer", verb, *batch)]

        return await in_batches(job_ids, send)

    async def _undelivered(
        self, groups: Any, length: int, running: int, now: int
    ) -> tuple[int, int]:
        """How many entries nobody was given yet, and how long the oldest of them has waited."""
        position = "-"
        lag: int | None = length
        if not length:
            return 0, 0
        for flat in groups or ():
            group = fields_of(flat)
            if group.get("name") == GROUP.encode():
                position = f"({group['last-delivered-id'].decode()}"
                lag = group.get("lag", max(0, length - running))
        first = await self._redis.call("XRANGE", self._keys[0], position, "+", "COUNT", 1)
        oldest = now - int(first[0][0].split(b"-")[0]) if first else 0
        return (lag if lag is not None else max(0, length - running)), max(0, oldest)


def _events(entries: Iterable[Any]) -> list[JobEvent]:
    return [event_of(*entry) for entry in entries]


def _record(job_id: str, flat: Any) -> JobRecord:
    if isinstance(flat, ServerError):
        return _unreadable(job_id, flat)
    raw = fields_of(flat)

    def text(name: str) -> str:
        return str(raw.get(name, b""), errors="replace")

    fence, _, attempt, max_attempts, lost, lease_until, worker = _lease_words(text("lease"))
    trace = text("entry").rpartition(" ")[2]
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=QUEUE,
        task=text("task"),
        state=text("status"),
        payload=raw.get("payload", b"null"),
        result=raw.get("result", b""),
        error=raw.get("error", b""),
        attempt=int(attempt),
        max_attempts=int(max_attempts),
        fence=int(fence),
        created_ms=number(raw.get("created_ts")),
        updated_ms=number(raw.get("updated_ts")),
        due_ms=number(raw.get("due_ms")),
        lease_until_ms=int(lease_until),
        ttl_ms=number(raw.get("ttl_s")) * 1000,
        worker_id="" if worker == "-" else worker,
        requester=text("requester"),
        progress=raw.get("progress", b""),
        trace="" if trace == "-" else trace,
        extra={
            "ttl_s": number(raw.get("ttl_s")),
            "cancel_requested": raw.get("cancel") == b"1",
            "leases_lost": int(lost),
        },
    )


def _unreadable(job_id: str, error: ServerError) -> JobRecord:
    """The row of a job whose key holds something else than a hash."""
    if not is_wrong_type(error):
        raise error
    message = f"job:{job_id} is not a hash; another program wrote it"
    return JobRecord(
        job_id=job_id,
        contract=CONTRACT,
        queue=QUEUE,
        task="",
        state="error",
        payload=b"null",
        error=msgspec.json.encode({"code": "unreadable", "message": message, "retryable": False}),
    )


def _lease_words(packed: str) -> list[str]:
    """Our own state of a job (see lua/include/job.lua); zeros where another program wrote."""
    words = packed.split(" ")
    if len(words) == 7 and all(word.isdecimal() and len(word) < 16 for word in words[:6]):
        return words
    return ["0", "0", "0", "0", "0", "0", "-"]


def _matches(record: JobRecord, query: Query, requester: str | None) -> bool:
    return (
        (not query.states or record.state in query.states)
        and (not query.task or record.task == query.task)
        and (requester is None or record.requester == requester)
    )


def _beat(worker_id: str, at: bytes, *rest: bytes) -> WorkerBeat:
    """The words of a worker: when, its claim (instance, number), the job it has alone, slots."""
    return WorkerBeat(worker_id, number(at), number(rest[3]) if len(rest) > 3 else 0)
