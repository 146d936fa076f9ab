"""Reading and steering the jobs of this contract, for gateway, dashboard and command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tenure.contracts.bullmq.events import read_events
from tenure.contracts.bullmq.family import Children, read_children
from tenure.contracts.bullmq.finding import STATES, Finder
from tenure.contracts.bullmq.job_options import PRIORITY_MAX
from tenure.contracts.bullmq.managing import Managing
from tenure.contracts.bullmq.options import CONTRACT, Options, client_name
from tenure.contracts.bullmq.records import number
from tenure.contracts.bullmq.scripts import BATCH_MAX, Scripts
from tenure.core.errors import NotFound, ServerError, UsageError
from tenure.core.job import JobEvent, JobRecord
from tenure.core.seam import (
    PAGE_BYTES,
    READ_STEP,
    Counts,
    Page,
    Query,
    WorkerBeat,
    first_page,
    is_full,
    weight,
)
from tenure.core.values import to_json
from tenure.store.redis import Arg, Redis
from tenure.store.resending import part

_CURSOR = re.compile(r"-?[0-9]{1,18}:.+", re.DOTALL)
# What repeats another event or tells of another request: a job's own story ends with its end.
_EVENTS_SCANNED_MAX = 100_000
_UNTOLD = frozenset({"retries-exhausted", "retry", "duplicated", "deduplicated"})


class BullmqLedger(Managing):
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._options = options
        self._scripts = Scripts(redis, options)
        self._finder = Finder(redis, options)
        self._keys = self._scripts.keys

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None when there is none (any more)."""
        (record,) = await self._finder.records([job_id])
        return record

    async def find(self, query: Query) -> Page:
        """Jobs by creation time, newest first. `after` is `created_ms:job_id` of the last seen."""
        unknown = set(query.states) - set(STATES)
        if unknown:
            raise UsageError(
                f"no such state: {', '.join(sorted(unknown))}; there are {', '.join(STATES)}",
                contract=CONTRACT,
            )
        if query.after and not _CURSOR.fullmatch(query.after):
            raise UsageError(
                f"{query.after!r} is not a cursor; pass the `after` of the page before",
                contract=CONTRACT,
            )
        listed = await self._finder.newest(query.states or STATES, query.after)
        ids, found = list(listed), list[JobRecord]()
        last, read = "", 0
        for start in range(0, len(ids), READ_STEP):
            for record in await self._finder.records(ids[start : start + READ_STEP], listed):
                if record is None:
                    continue
                matches = not query.task or record.task == query.task
                if (matches and len(found) >= query.limit) or read >= PAGE_BYTES:
                    return Page(found, last)
                last, read = f"{record.created_ms}:{record.job_id}", read + weight(record)
                if matches:
                    found.append(record)
        return Page(found)

    async def counts(self) -> Counts:
        """Depth by state now."""
        wait, active, prioritized, delayed, paused, meta = self._keys[:6]
        replies = await self._redis.pipeline(
            [
                ("LLEN", wait),
                ("ZCARD", prioritized),
                ("ZCARD", delayed),
                ("LLEN", active),
                ("ZCARD", self._keys[13]),
                ("ZCARD", self._keys[11]),
                ("ZCARD", self._keys[12]),
                ("LLEN", paused),
                ("HGET", meta, "paused"),
                ("LINDEX", wait, -1),
                ("CLIENT", "LIST"),
                ("TIME",),
            ]
        )
        # A key of another type, which upkeep puts aside, counts as none.
        replies = [None if isinstance(reply, ServerError) else reply for reply in replies]
        numbers, (is_paused, oldest, clients, clock) = replies[:8], replies[8:]
        states = dict(zip(STATES, (count or 0 for count in numbers), strict=True))
        now = int(clock[0]) * 1000 + int(clock[1]) // 1000
        return Counts(
            states=states,
            totals={"completed": states["completed"], "failed": states["failed"]},
            paused=bool(is_paused),
            workers=self._workers(clients),
            oldest_waiting_ms=await self._waited(oldest, now),
        )

    async def workers(self) -> list[WorkerBeat]:
        """Workers whose connection carries their name, as Node's getWorkers() sees them.

        How many jobs each runs at once only ours say, in a key that no client of BullMQ reads.
        """
        ours = f"{self._options.key_prefix}tenure:workers"
        clients, clock, flat = await self._redis.pipeline(
            [("CLIENT", "LIST"), ("TIME",), ("HGETALL", ours)]
        )
        now = int(clock[0]) * 1000
        start = f"{client_name(self._options)}:w:"
        found: dict[str, int] = {}
        for line in clients.decode(errors="replace").splitlines():
            fields = dict(field.split("=", 1) for field in line.split(" ") if "=" in field)
            if fields.get("name", "").startswith(start):
                name = fields["name"][len(start) :]
                heard = now - 1000 * int(fields.get("idle", "0"))
                found[name] = max(heard, found.get(name, 0))
        told: dict[str, tuple[int, int]] = {}
        pairs = [] if isinstance(flat, ServerError) else zip(flat[::2], flat[1::2], strict=True)
        for name, words in pairs:
            at, _, slots = words.partition(b" ")
            told[name.decode(errors="replace")] = (number(at), number(slots))
        beats = []
        for name, heard_ms in found.items():
            at_ms, slots = told.get(name, (0, 0))
            beats.append(WorkerBeat(name, max(heard_ms, at_ms), slots))
        return beats

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """What the queue's event stream says of one job after a stream id.

        The stream is the whole queue's and is trimmed; of a job of long ago nothing may be left.
        """
        told: list[JobEvent] = []
        start = f"({after}" if after else "-"
        scanned, count = 0, READ_STEP
        while scanned < _EVENTS_SCANNED_MAX and not is_full(told, limit):
            entries = await self._redis.call("XRANGE", self._keys[6], start, "+", "COUNT", count)
            told += [event for event in read_events(entries, job_id) if event.type not in _UNTOLD]
            if len(entries) < count:
                break
            start, scanned = f"({entries[-1][0].decode()}", scanned + count
            # Longer steps where entries are small: most are about other jobs.
            size = sum(len(text) for _, flat in entries for text in flat)
            count = min(2_000, 4 * count) if size < PAGE_BYTES // 8 else READ_STEP
        return first_page(told, limit)

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._scripts.run("pause", "pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._scripts.run("pause", "resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back, attempts counted anew; per id "ok" or what forbids it."""
        return await self._steer("steer", job_ids, "retry")

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", or its end."""
        return await self._steer("steer", job_ids, "cancel")

    async def remove(self, job_ids: Sequence[str], *, children: bool = True) -> list[str]:
        """Remove jobs, and their children unless told otherwise; per id "ok", "missing", or
        "active" when it or one of those children runs."""
        return await self._steer("remove", job_ids, int(children))

    async def promote(self, job_ids: Sequence[str]) -> list[str]:
        """Let delayed jobs run now; per id "ok", "missing", or the state it is in instead."""
        return await self._steer("steer", job_ids, "promote")

    async def change_delay(self, job_ids: Sequence[str], delay_ms: int) -> list[str]:
        """Let delayed jobs run `delay_ms` from now; per id "ok", "missing", or the state it is in
        instead."""
        if delay_ms < 0:
            raise UsageError(f"a delay cannot be negative: {delay_ms} ms", contract=CONTRACT)
        return await self._steer("change", job_ids, "delay", delay_ms, 0)

    async def change_priority(
        self, job_ids: Sequence[str], priority: int, *, first: bool = False
    ) -> list[str]:
        """Give jobs another priority (0 comes before all), `first` among its equals if asked; per
        id "ok", "missing", or the end it has come to."""
        if not 0 <= priority <= PRIORITY_MAX:
            raise UsageError(
                f"priority {priority}: a whole number from 0 to {PRIORITY_MAX}", contract=CONTRACT
            )
        return await self._steer("change", job_ids, "priority", priority, int(first))

    async def update_data(self, job_id: str, data: Any) -> None:
        """Replace the data of a job, as BullMQ's `updateData`; a running handler keeps its own."""
        (answer,) = await self._steer("change", [job_id], "data", to_json(data), 0)
        if answer == "missing":
            raise NotFound(f"there is no job {job_id}", contract=CONTRACT)

    async def retry_all(self, state: str = "failed", *, before_ms: int | None = None) -> int:
        """Send every failed (or completed) job back that ended by `before_ms`; how many.

        As BullMQ's `retryJobs`: attempts go on counting, and priorities are not looked at.
        """
        if state not in ("failed", "completed"):
            raise UsageError(f"state {state!r}: only failed or completed jobs can be sent back")
        last = before_ms if before_ms is not None else await self._redis.server_time_ms()
        return await self._bulk(state, last)

    async def promote_all(self) -> int:
        """Let every delayed job run now, as BullMQ's `promoteJobs`; how many."""
        return await self._bulk("delayed", 0)

    async def drain(self, *, delayed: bool = False) -> int:
        """Remove every job that waits; with `delayed` also those that wait for their time."""
        return len(await self._scripts.run("sweep", "drain", 1 if delayed else 0, 0, 0))

    async def clean(self, state: str, *, older_ms: int = 0, limit: int = 1_000) -> list[str]:
        """Remove jobs of a state that are older than `older_ms`; returns their ids.

        `limit` (0: none) bounds how many are looked at, those first whose turn is next.
        """
        word = {"waiting": "wait", "wait": "wait", "paused": "wait"}.get(state, state)
        if word not in ("wait", *STATES):
            raise UsageError(f"no such state: {state}; there are {', '.join(STATES)}")
        gone = await self._scripts.run("sweep", "clean", word, older_ms, limit)
        return [each.decode() for each in gone]

    async def children(self, job_id: str) -> Children:
        """The children of a job: what each of them left, and which are still to come."""
        return await read_children(self._redis, self._job_key(job_id))

    async def logs(self, job_id: str) -> list[str]:
        """The lines that handlers logged to the job."""
        lines = await self._redis.call("LRANGE", self._job_key(job_id) + ":logs", 0, -1)
        return [line.decode(errors="replace") for line in lines]

    async def log(self, job_id: str, line: str, *, keep: int = 0) -> int:
        """Add a line to the job's log, keeping at most `keep` (0: all); how many there are then."""
        key = self._job_key(job_id)
        if not await self._redis.call("EXISTS", key):
            raise NotFound(f"there is no job {job_id} to log to", contract=CONTRACT)
        commands: list[tuple[Arg, ...]] = [("RPUSH", f"{key}:logs", line)]
        if keep:
            commands.append(("LTRIM", f"{key}:logs", -keep, -1))
        replies = await self._redis.pipeline(commands)
        return min(replies[0], keep) if keep else int(replies[0])

    async def probe(self) -> None:
        """Raise `StoreError` where the server takes no writes."""
        await self._redis.call("SET", f"{self._options.key_prefix}tenure:probe", "", "PX", 1)

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _job_key(self, job_id: str) -> str:
        return self._options.key_prefix + job_id

    async def _steer(self, script: str, job_ids: Sequence[str], *how: Arg) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(job_ids), BATCH_MAX):  # one script stays short for the others
            chunk = job_ids[start : start + BATCH_MAX]
            replies = await part(start, self._scripts.run(script, *how, *chunk))
            answers += [reply.decode() for reply in replies]
        return answers

    async def _bulk(self, state: str, last_ms: int) -> int:
        sent = 0
        while moved := await part(sent, self._scripts.run("bulk", state, BATCH_MAX, last_ms)):
            sent += moved
            if moved < BATCH_MAX:
                break
        return sent

    def _workers(self, clients: bytes) -> int:
        """Connections that carry a worker's name; Node's getWorkers() counts the same way."""
        plain = client_name(self._options)
        names = [
            field[5:]
            for line in clients.decode(errors="replace").splitlines()
            for field in line.split(" ")
            if field.startswith("name=")
        ]
        return len({n for n in names if n.startswith(f"{plain}:w:")}) + names.count(plain)

    async def _waited(self, job_id: bytes | None, now: int) -> int:
        if not job_id:
            return 0
        key = self._options.key_prefix.encode() + job_id
        (created,) = await self._redis.pipeline([("HGET", key, "timestamp")])
        return max(0, now - number(created)) if isinstance(created, bytes) else 0
