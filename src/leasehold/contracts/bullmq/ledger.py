"""Reading and steering the jobs of this contract, for gateway, dashboard and command line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from leasehold.contracts.bullmq.events import read_events
from leasehold.contracts.bullmq.options import CONTRACT, Options, client_name, keys
from leasehold.contracts.bullmq.queue import SCRIPTS
from leasehold.contracts.bullmq.records import number, record_of
from leasehold.core.errors import NotFound, UsageError
from leasehold.core.job import JobEvent, JobRecord
from leasehold.core.seam import Counts, Page, Query, WorkerBeat
from leasehold.store.redis import Arg, Redis

STATES = (
    *("waiting", "prioritized", "delayed", "active", "waiting-children", "completed", "failed"),
    "paused",
)
# What repeats another event or tells of another request: a job's own story ends with its end.
_UNTOLD = frozenset({"retries-exhausted", "retry", "duplicated", "deduplicated"})
_SCAN_MAX = 20_000
_CHUNK = 500


class BullmqLedger:
    """The ledger of one queue, for one event loop."""

    def __init__(self, redis: Redis, options: Options) -> None:
        self._redis = redis
        self._options = options
        self._keys = keys(options.key_prefix)

    async def get(self, job_id: str) -> JobRecord | None:
        """The job, or None when there is none (any more)."""
        (record,) = await self._records([job_id])
        return record

    async def find(self, query: Query) -> Page:
        """Jobs by creation time, newest first. `after` is `created_ms:job_id` of the last seen.

        BullMQ has no index by time: the ids of the asked states are read, newest of each first, up
        to a bound.
        """
        unknown = set(query.states) - set(STATES)
        if unknown:
            raise UsageError(
                f"no such state: {', '.join(sorted(unknown))}; there are {', '.join(STATES)}",
                contract=CONTRACT,
            )
        ids = await self._ids(query.states or STATES)
        found = [record for record in await self._records(ids) if record is not None]
        found.sort(key=_place, reverse=True)
        if query.after:
            created, _, last_id = query.after.partition(":")
            found = [each for each in found if _place(each) < (int(created), _natural(last_id))]
        if query.task:
            found = [each for each in found if each.task == query.task]
        page = found[: query.limit]
        more = len(found) > query.limit
        return Page(page, f"{page[-1].created_ms}:{page[-1].job_id}" if more else "")

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
        numbers, (is_paused, oldest, clients, clock) = replies[:8], replies[8:]
        states = dict(zip(STATES, numbers, strict=True))
        now = int(clock[0]) * 1000 + int(clock[1]) // 1000
        return Counts(
            states=states,
            totals={"completed": states["completed"], "failed": states["failed"]},
            paused=bool(is_paused),
            workers=self._workers(clients),
            oldest_waiting_ms=await self._waited(oldest, now),
        )

    async def workers(self) -> list[WorkerBeat]:
        """Workers whose connection carries their name, as Node's getWorkers() sees them."""
        clients, clock = await self._redis.pipeline([("CLIENT", "LIST"), ("TIME",)])
        now = int(clock[0]) * 1000
        start = f"{client_name(self._options)}:w:"
        found: dict[str, int] = {}
        for line in clients.decode(errors="replace").splitlines():
            fields = dict(field.split("=", 1) for field in line.split(" ") if "=" in field)
            if fields.get("name", "").startswith(start):
                name = fields["name"][len(start) :]
                heard = now - 1000 * int(fields.get("idle", "0"))
                found[name] = max(heard, found.get(name, 0))
        return [WorkerBeat(name, last_ms) for name, last_ms in found.items()]

    async def events(self, job_id: str, *, after: str = "", limit: int = 1000) -> list[JobEvent]:
        """What the queue's event stream says of one job after a stream id.

        The stream is the whole queue's and is trimmed; of a job of long ago nothing may be left.
        """
        told: list[JobEvent] = []
        start = f"({after}" if after else "-"
        while len(told) < limit:
            entries = await self._redis.call("XRANGE", self._keys[6], start, "+", "COUNT", 2_000)
            told += [event for event in read_events(entries, job_id) if event.type not in _UNTOLD]
            if len(entries) < 2_000:
                break
            start = f"({entries[-1][0].decode()}"
        return told[:limit]

    async def pause(self) -> None:
        """Hand out no more leases."""
        await self._run("pause", "pause")

    async def resume(self) -> None:
        """Hand out leases again."""
        await self._run("pause", "resume")

    async def retry(self, job_ids: Sequence[str]) -> list[str]:
        """Send finished jobs back, attempts counted anew; per id "ok" or what forbids it."""
        return await self._steer("retry", job_ids)

    async def cancel(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok" (was waiting), "requested" (its worker is told), "missing", or its end."""
        return await self._steer("cancel", job_ids)

    async def remove(self, job_ids: Sequence[str]) -> list[str]:
        """Per id "ok", "missing", or "active"."""
        return await self._steer("remove", job_ids)

    async def promote(self, job_ids: Sequence[str]) -> list[str]:
        """Let delayed jobs run now; per id "ok", "missing", or the state it is in instead."""
        return await self._steer("promote", job_ids)

    async def drain(self, *, delayed: bool = False) -> int:
        """Remove every job that waits; with `delayed` also those that wait for their time."""
        return len(await self._run("sweep", "drain", 1 if delayed else 0, 0, 0))

    async def clean(self, state: str, *, older_ms: int = 0, limit: int = 1_000) -> list[str]:
        """Remove jobs of a state that are older than `older_ms`; returns their ids."""
        word = {"waiting": "wait", "wait": "wait", "paused": "wait"}.get(state, state)
        if word not in ("wait", *STATES):
            raise UsageError(f"no such state: {state}; there are {', '.join(STATES)}")
        gone = await self._run("sweep", "clean", word, older_ms, limit)
        return [each.decode() for each in gone]

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

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    def _job_key(self, job_id: str) -> str:
        return self._options.key_prefix + job_id

    async def _run(self, name: str, *args: Arg) -> Any:
        return await self._redis.run(SCRIPTS[name], self._keys, (self._options.key_prefix, *args))

    async def _steer(self, verb: str, job_ids: Sequence[str]) -> list[str]:
        answers: list[str] = []
        for start in range(0, len(job_ids), _CHUNK):  # one script stays short for the others
            replies = await self._run("steer", verb, *job_ids[start : start + _CHUNK])
            answers += [reply.decode() for reply in replies]
        return answers

    async def _ids(self, states: Sequence[str]) -> list[str]:
        wait, active, prioritized, delayed, paused = self._keys[:5]
        last = _SCAN_MAX - 1
        reads: dict[str, tuple[Arg, ...]] = {
            "waiting": ("LRANGE", wait, 0, last),
            "paused": ("LRANGE", paused, 0, last),
            "active": ("LRANGE", active, 0, last),
            "prioritized": ("ZRANGE", prioritized, 0, last),
            "delayed": ("ZRANGE", delayed, 0, last),
            "waiting-children": ("ZREVRANGE", self._keys[13], 0, last),
            "completed": ("ZREVRANGE", self._keys[11], 0, last),
            "failed": ("ZREVRANGE", self._keys[12], 0, last),
        }
        replies = await self._redis.pipeline([reads[state] for state in states])
        return list(dict.fromkeys(each.decode() for reply in replies for each in reply))

    async def _records(self, ids: Sequence[str]) -> list[JobRecord | None]:
        """Hash and place of each job; the places are asked for in the same go."""
        found: list[JobRecord | None] = []
        wait, active, prioritized, delayed, paused = self._keys[:5]
        sets = (
            (self._keys[11], "completed"),
            (self._keys[12], "failed"),
            (delayed, "delayed"),
            (prioritized, "prioritized"),
            (self._keys[13], "waiting-children"),
        )
        lists = ((active, "active"), (wait, "waiting"), (paused, "paused"))
        width = 1 + len(sets) + len(lists)
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            commands: list[tuple[Arg, ...]] = []
            for job_id in chunk:
                commands.append(("HGETALL", self._job_key(job_id)))
                commands += [("ZSCORE", key, job_id) for key, _ in sets]
                commands += [("LPOS", key, job_id) for key, _ in lists]
            replies = await self._redis.pipeline(commands)
            names = [name for _, name in (*sets, *lists)]
            for at, job_id in enumerate(chunk):
                flat, *places = replies[at * width : (at + 1) * width]
                state = next(
                    (name for name, place in zip(names, places, strict=True) if place is not None),
                    "unknown",
                )
                raw = dict(zip(flat[::2], flat[1::2], strict=True))
                found.append(
                    record_of(job_id, self._options.queue, state, raw) if raw.get(b"name") else None
                )
        return found

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
        created = await self._redis.call("HGET", self._job_key(job_id.decode()), "timestamp")
        return max(0, now - number(created)) if created else 0


def _place(record: JobRecord) -> tuple[int, tuple[int, str]]:
    return (record.created_ms, _natural(record.job_id))


def _natural(job_id: str) -> tuple[int, str]:
    """Ids that BullMQ counts are ordered as numbers."""
    return (int(job_id), "") if job_id.isdecimal() else (-1, job_id)
