"""All that serves one queue, wired together: source, flushers, claimer, keeper, upkeep."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from random import Random
from typing import Any

import structlog

from tenure.core.errors import LeaseLost
from tenure.core.seam import Bounded, Parallel
from tenure.worker.backoff import Backoff
from tenure.worker.claiming import Claimer
from tenure.worker.config import Settings
from tenure.worker.execute import Executor
from tenure.worker.keeper import Keeper, Post
from tenure.worker.outcomes import refused
from tenure.worker.settling import Answers, Entry, Flusher
from tenure.worker.slots import Slots
from tenure.worker.source import Opener, Source
from tenure.worker.upkeep import keep_up
from tenure.worker.watching import Watch

log = structlog.get_logger("tenure.worker")


class Service:
    """One queue being served. The worker runs its `loops` as tasks of its own loop."""

    def __init__(
        self,
        name: str,
        opener: Opener,
        *,
        executor: Executor,
        slots: Slots,
        settings: Settings,
        clock: Callable[[], float],
        rng: Random,
        watch: Watch,
        post: Post,
        told: Callable[[str, int], None],
        nudge: Callable[[Keeper], None],
        quarantined: dict[str, int],
    ) -> None:
        self.opener = opener
        queue = opener()
        share = slots.share(
            queue.claim_max if isinstance(queue, Bounded) else None,
            int(getattr(queue, "slots_max", 0)),
        )
        self.source = Source(name, queue, share, slots=slots.total, quarantined=quarantined)
        self.source.loop = asyncio.get_running_loop()
        self._executor = executor
        self._settings = settings
        self._clock = clock
        self._rng = rng
        self._watch = watch
        lanes = queue.settles_at_once if isinstance(queue, Parallel) else 1
        self.source.settles = self._flusher(queue.settle, self._settle_answers(), lanes)
        self.source.reports = self._flusher(queue.report, self._report_answers())
        self.keeper = Keeper(
            self.source,
            clock=clock,
            post=post,
            interval_ms_max=settings.keeper_ms_max,
            told=told,
        )
        self.claimer = Claimer(
            self.source,
            executor,
            slots,
            settings,
            clock=clock,
            backoff=self._backoff(),
            watch=watch,
            lease_changed=partial(nudge, self.keeper),
        )

    def loops(self) -> list[Coroutine[Any, Any, None]]:
        """What runs beside the claimer for as long as the worker does."""
        upkeep = keep_up(
            self.source,
            interval_ms=self._settings.upkeep_ms,
            rng=self._rng,
            watch=self._watch,
        )
        return [self.source.settles.run(), self.source.reports.run(), upkeep]

    def _backoff(self) -> Backoff:
        return Backoff(self._rng, self._settings.backoff_ms, self._settings.backoff_ms_max)

    def _flusher(
        self, send: Callable[[list[Any]], Any], answers: Answers, lanes: int = 1
    ) -> Flusher:
        return Flusher(
            send,
            answers,
            clock=self._clock,
            backoffs=[self._backoff() for _ in range(lanes)],
            batch_max=self._settings.settle_batch_max,
            tries_max=self._settings.settle_tries_max,
        )

    def _settle_answers(self) -> Answers:
        def failed(error: BaseException) -> None:
            self.source.contact.failed("settle", error)
            self._watch.tell("settle_failed")

        announcer = self._executor.announcer
        return Answers(announcer.verdicts, announcer.dropped, failed, refused)

    def _report_answers(self) -> Answers:
        def failed(error: BaseException) -> None:
            self.source.contact.failed("report", error)
            self._watch.tell("report_failed")

        return Answers(self._reported, self._report_dropped, failed)

    def _reported(self, entries: Sequence[Entry], answers: Sequence[LeaseLost | None]) -> None:
        for entry, answer in zip(entries, answers, strict=True):
            self.source.report_done(entry, answer)
            if answer is not None:
                self._end_lost(entry)
        self.source.contact.made("report")
        self._watch.tell("reported", len(entries))

    def _report_dropped(self, entry: Entry, error: Exception) -> None:
        """The handler gets the error; it ends the attempt only if the lease is over."""
        self.source.report_done(entry, error)
        if isinstance(error, LeaseLost):
            self._end_lost(entry)

    def _end_lost(self, entry: Entry) -> None:
        """Mark it at once; stop the handler one turn later, when it has met its `LeaseLost`."""
        attempt = self.source.held.get(entry.held)
        if attempt is not None and not entry.held.concluded:
            entry.held.lost = True
            asyncio.get_running_loop().call_soon(self._executor.end, attempt, "lost")
