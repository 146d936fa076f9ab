"""The `bullmq` contract for the conformance suite: a job that waits is in one of three states."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping

from tenure.contracts.bullmq.scripts import SCRIPTS
from tests.contract.folding import folded
from tests.contract.stages import StoredStage, Words, query_of, redis_stage

WORDS = Words("waiting", "active", "completed", "failed", "failed")
_NAMES = {"depth_max": "max_depth"}
_unique = itertools.count(1)


class BullmqAdapter:
    name = "bullmq"
    cannot: Mapping[str, str] = {
        "ttl_before_start": "BullMQ jobs have no time to live before they start",
        "lost_is_attempt": "lost locks have a budget of their own, maxStalledCount, of the worker",
        "retention": "finished jobs go by count and age when another one finishes, not by upkeep",
        "stored_schedules": "its own job schedulers store the next job when one is picked up",
    }

    def __init__(self, server_url: Callable[[], str]) -> None:
        self._server_url = server_url

    async def open(self, **options: int) -> StoredStage:
        lease_ms = options.setdefault("lease_ms", 300)
        options.pop("retry_delay_ms", None)  # a BullMQ job names its own backoff; none is none
        named = {_NAMES.get(name, name): value for name, value in options.items()}
        url, name = self._server_url(), f"suite-{os.getpid()}-{next(_unique)}"
        prefix = {"prefix": f"{{{name}}}"} if "+cluster" in url else {}
        query = query_of({**named, "queue": name, **prefix})
        stage = redis_stage(
            self, url, query, lease_ms=lease_ms, words=WORDS, scripts=SCRIPTS, tag=name
        )
        return folded(stage, "prioritized", "delayed")
