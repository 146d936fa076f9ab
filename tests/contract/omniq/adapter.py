"""The `omniq` contract for the conformance suite: a job that waits is in one of two states."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping

from tenure.contracts.omniq.calls import SCRIPTS
from tests.contract.folding import folded
from tests.contract.stages import StoredStage, Words, query_of, redis_stage

WORDS = Words("wait", "active", "completed", "failed", "failed")
_NAMES = {"depth_max": "max_depth", "lease_ms": "timeout_ms", "retry_delay_ms": "backoff_ms"}
_unique = itertools.count(1)


class OmniqAdapter:
    name = "omniq"
    cannot: Mapping[str, str] = {
        "flows": "version 1 has no step that ends one job and begins another",
        "priority": "OmniQ has no priorities; groups and their limits are its way to share",
        "ttl_before_start": "OmniQ jobs have no time to live before they start",
        "retention": "finished jobs go by count when another one finishes, not by age",
        "token_in_journal": "tokens are made inside the script, which cannot hash them by SHA-256",
    }

    def __init__(self, server_url: Callable[[], str]) -> None:
        self._server_url = server_url

    async def open(self, **options: int) -> StoredStage:
        lease_ms = options.setdefault("lease_ms", 300)
        options.setdefault("retry_delay_ms", 0)
        named = {_NAMES.get(name, name): value for name, value in options.items()}
        name = f"suite-{os.getpid()}-{next(_unique)}"
        own: dict[str, object] = {
            "queue": name,
            "keep_completed": 5_000,  # the suite looks at more finished jobs than OmniQ keeps
        }
        query = query_of({**named, **own})
        url = self._server_url()
        stage = redis_stage(
            self, url, query, lease_ms=lease_ms, words=WORDS, scripts=SCRIPTS, tag=name
        )
        return folded(stage, "delayed")
