"""The two sides of a comparison: BullMQ itself and our scripts, made to take the same steps."""

from __future__ import annotations

from typing import Any

import redis

from tenure.contracts.bullmq import Producer
from tenure.contracts.bullmq.ledger import BullmqLedger
from tenure.contracts.bullmq.options import Options
from tenure.contracts.bullmq.queue import BullmqQueue
from tenure.core.lease import Lease, Report
from tenure.core.outcome import Failure, Outcome
from tenure.store.redis import Redis
from tests.interop.bullmq.keyspace import keyspace
from tests.interop.bullmq.peer import Node

# Words of deduplication that 5.61 does not know (see DEVIATIONS.md): nothing to compare there.
ONLY_IN_6 = frozenset({"keepLastIfActive", "reschedule"})


def differences(raw: redis.Redis, queue: str, *, ordered: bool = True) -> dict[str, Any]:
    """Every key in which the two sides differ, with what each has there.

    Redis hands out the members of a set in an order that depends on their names, so what happens to
    siblings may be told in another order: `ordered` False compares the events without it.
    """
    expected, found = keyspace(raw, "official", queue), keyspace(raw, "ours", queue)
    if not ordered:
        for side in (expected, found):
            side["events"] = sorted(side.get("events", []), key=str)
    return {
        key: {"ours": found.get(key), "official": expected.get(key)}
        for key in expected.keys() | found.keys()
        if found.get(key) != expected.get(key)
    }


class OfficialSide:
    """BullMQ itself, driven step by step."""

    def __init__(
        self, node: Node, queue: str, raw: redis.Redis, options: dict[str, Any] | None = None
    ) -> None:
        self._node, self._queue, self._raw = node, queue, raw
        self.held: list[str] = []
        node.call(f"queue:{queue}", "count")  # BullMQ notes its settings when it opens a queue
        if options:
            asked = {"worker_options": options, "queue": queue}
            node.call(f"worker:{queue}", "waitUntilReady", **asked)

    def do(self, verb: str, arg: Any) -> None:  # noqa: C901 - one arm a step
        call, queue = self._node.call, f"queue:{self._queue}"
        job = f"job:{self._queue}:{arg}"
        match verb:
            case "add":
                call(queue, "add", "work", {"n": 1}, arg)
            case "claim":
                taken = call(f"worker:{self._queue}", "getNextJob", "token", {"block": False})
                decided = taken and taken.get("deferredFailure")
                if decided:  # Node's worker fails it at once, as ours does
                    call(f"job:{self._queue}:{taken['id']}", "fail", decided, "token", True)
                    self.do(verb, arg)
                elif taken:
                    self.held.append(taken["id"])
            case "complete":
                call(job, "moveToCompleted", {"r": 1}, "token", False)
            case "fail":
                call(job, "fail", "broken", "token")
            case "fatal":
                call(job, "fail", "hopeless", "token", True)
            case "release":
                call(job, "moveToWait", "token")
            case "snooze":
                call(job, "moveToDelayed", 4_000_000_000_000, "token")
            case "progress":
                call(job, "updateProgress", 25)
            case "extend":
                call(job, "extendLock", "token", 30_000)
            case "pause" | "resume":
                call(queue, verb)
            case "remove":
                call(job, "remove")
            case "again":
                call(job, "retry", "failed")
            case "promote":
                call(job, "promote")
            case "drain":
                call(queue, "drain", arg != "waiting")
            case "clean":
                state, older_ms, limit = arg
                call(queue, "clean", older_ms, limit, state)
            case "change-delay":
                call(job, "changeDelay", 90_000)
            case "change-priority":
                call(job, "changePriority", {"priority": 2})
            case "to-front":
                call(job, "changePriority", {"priority": 0, "lifo": True})
            case "retry-all":
                call(queue, "retryJobs", {"state": arg})
            case "promote-all":
                call(queue, "promoteJobs", {})
            case "log":
                call(job, "log", "a line")
            case "park":
                assert call(job, "moveToWaitingChildren", "token") is True
            case "rest":
                call(f"worker:{self._queue}", "rateLimit", 60_000)
                call(job, "moveToWait", "token")
            case "stall":
                start = f"official:{self._queue}:"
                for _ in range(2):
                    self._raw.delete(f"{start}{arg}:lock", f"{start}stalled-check")
                    call(f"worker:{self._queue}", "moveStalledJobsToWait")


class OurSide:
    """The same steps by our scripts."""

    def __init__(self, url: str, queue: str, raw: redis.Redis, **settings: Any) -> None:
        options = Options(queue=queue, prefix="ours", **settings)
        self._queue = BullmqQueue(Redis(url), options, worker_id="w")
        self._producer = Producer(Redis(url), options)
        self._ledger = BullmqLedger(Redis(url), options)
        self._raw, self._start = raw, options.key_prefix
        raw.hset(f"{self._start}meta", "opts.maxLenEvents", "10000")
        self.held: dict[str, Lease] = {}

    async def do(self, verb: str, arg: Any) -> None:  # noqa: C901 - one arm a step
        match verb:
            case "add":
                await self._producer.add("work", {"n": 1}, **arg)
            case "claim":
                for lease in await self._queue.claim(1, wait_ms=0):
                    self.held[lease.job_id] = lease
            case "complete":
                await self._settle(arg, "complete", result=b'{"r":1}')
            case "fail":
                await self._settle(arg, "fail", failure=Failure(code="Error", message="broken"))
            case "fatal":
                await self._settle(arg, "bury", failure=Failure(code="Error", message="hopeless"))
            case "release":
                await self._settle(arg, "release")
            case "snooze":
                await self._settle(arg, "snooze", delay_ms=60_000_000)
            case "progress":
                await self._queue.report([Report(lease=self.held[arg], progress=b"25")])
            case "extend":
                await self._queue.extend([self.held[arg]])
            case "pause" | "resume":
                await getattr(self._ledger, verb)()
            case "remove" | "promote":
                await getattr(self._ledger, verb)([arg])
            case "again":
                await self._ledger._apply_action([arg], "again")
            case "drain":
                await self._ledger.drain(delayed=arg != "waiting")
            case "clean":
                state, older_ms, limit = arg
                await self._ledger.clean(state, older_ms=older_ms, limit=limit)
            case "change-delay":
                assert await self._ledger.change_delay([arg], 90_000) == ["ok"]
            case "change-priority":
                assert await self._ledger.change_priority([arg], 2) == ["ok"]
            case "to-front":
                assert await self._ledger.change_priority([arg], 0, first=True) == ["ok"]
            case "retry-all":
                await self._ledger.retry_all(arg)
            case "promote-all":
                await self._ledger.promote_all()
            case "log":
                report = Report(lease=self.held[arg], type="log", data=b'{"text":"a line"}')
                assert await self._queue.report([report]) == [None]
            case "park":
                await self._settle(arg, "snooze", until="children")
            case "rest":
                await self._settle(arg, "snooze", until="rate_limit", delay_ms=60_000)
            case "stall":
                self._raw.delete(f"{self._start}{arg}:lock", f"{self._start}stalled-check")
                await self._queue.upkeep()

    async def _settle(self, job_id: str, kind: Any, **fields: Any) -> None:
        await self._queue.settle([Outcome(self.held.pop(job_id), kind, **fields)])

    async def close(self) -> None:
        for each in (self._queue, self._producer, self._ledger):
            await each.close()
