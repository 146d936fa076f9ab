"""Taking leases: one claim at a time, none lost with its answer, and waiting without polling much.

Our own publishers ring a bell, the stream `{queue}:wake`; other OmniQ clients do not, so a waiting
claim also looks every `poll_ms`. The blocking read on the bell stays pending between two looks.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from tenure.contracts.omniq.calls import Calls
from tenure.contracts.omniq.options import Options, queue_base
from tenure.contracts.omniq.replies import quarantined
from tenure.core.seam import Quarantined
from tenure.store.redis import Redis

BATCH_MAX = 500
_TEND_MAX = 100
_HELD_MAX = 100_000
_TOLD_MAX = 1_000
_BLOCK_MS = 5_000
_PAUSED_POLL_MS = 200


class Claimer:
    """Claims for one instance of a queue.

    `held` are the ids of leases that it knows of, `quarantined` records that were set aside and
    are not logged yet.
    """

    def __init__(self, calls: Calls, options: Options, worker_id: str) -> None:
        self.held: dict[str, None] = {}
        self.quarantined: list[Quarantined] = []
        self._calls = calls
        self._options = options
        self._worker_id = worker_id
        self._bell = Bell(calls.redis, f"{queue_base(options.queue)}:wake")
        # One claim at a time: a second one could not tell what the first is about to hold.
        self._asking = asyncio.Lock()
        self._answer_lost = False
        self._number = 0

    async def once(self, limit: int, *, now_ms: int = 0, tends: bool = True) -> Any:
        """One claim: (state, now_ms, last wake id, next due_ms, lease rows, news)."""
        async with self._asking:
            recover = self._answer_lost
            self._number += 1
            # Set before asking: whatever ends this call early, the next one undoes what it took.
            self._answer_lost = True
            reply = await self._calls.run(
                "claim",
                now_ms,
                self._worker_id,
                min(limit, BATCH_MAX),
                self._calls.instance,
                self._number,
                secrets.token_hex(16),
                _TEND_MAX if tends else 0,
                chance(),
                self._options.keep_completed,
                self._options.keep_failed,
                int(recover),
                *(self.held if recover else ()),
            )
            self._answer_lost = False
            self.told(reply[5])
            for row in reply[4]:
                self._hold(row[0].decode())
            return reply

    async def wait(self, limit: int, wait_ms: int) -> list[Any]:
        """Lease rows, at least one unless `wait_ms` runs out first."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_ms / 1000
        while True:
            state, now, woken, due, rows, _ = await self.once(limit)
            left_ms = (deadline - loop.time()) * 1000
            if rows or left_ms <= 0:
                return list(rows)
            poll_ms = _PAUSED_POLL_MS if state == b"paused" else self._options.poll_ms
            if due and state == b"ok":
                poll_ms = min(poll_ms, max(1, due - now))
            await self._bell.wait(min(left_ms, poll_ms), woken)

    def told(self, rows: list[bytes]) -> None:
        """A script set something aside."""
        self.quarantined += quarantined(rows)
        del self.quarantined[:-_TOLD_MAX]  # without a reader the latest are kept

    def take_quarantined(self) -> list[Quarantined]:
        """What was set aside since the last call."""
        taken, self.quarantined = self.quarantined, []
        return taken

    def release(self, job_id: str) -> None:
        """The lease is over."""
        self.held.pop(job_id, None)

    async def close(self) -> None:
        """Stop waiting."""
        await self._bell.close()

    def _hold(self, job_id: str) -> None:
        self.held[job_id] = None
        if len(self.held) > _HELD_MAX:  # only leases that were lost unsettled stay here
            del self.held[next(iter(self.held))]


class Bell:
    """Waits for the next entry of a wake stream; one blocking read serves many waits."""

    def __init__(self, redis: Redis, key: str) -> None:
        self._redis = redis
        self._key = key
        self._pending: asyncio.Task[Any] | None = None

    async def wait(self, wait_ms: float, last: bytes) -> None:
        """Return when somebody rings after `last`, or when the time is up."""
        if last == b"0-0" and self._pending is None:
            last = b"0"
        task = self._pending
        if task is None or task.done():
            task = self._pending = asyncio.create_task(self._listen(last))
        done, _ = await asyncio.wait({task}, timeout=wait_ms / 1000)
        if done and task.exception() is not None:
            self._pending = None
            await asyncio.sleep(min(wait_ms, 50) / 1000)  # the next claim tells what is wrong

    async def close(self) -> None:
        """Give up the read."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _listen(self, last: bytes) -> Any:
        return await self._redis.block(
            "XREAD", "COUNT", 1, "BLOCK", _BLOCK_MS, "STREAMS", self._key, last, wait_ms=_BLOCK_MS
        )


def chance() -> float:
    """A random number for a script's jitter: a script has none of its own."""
    return secrets.randbelow(1_000_000) / 1_000_000
