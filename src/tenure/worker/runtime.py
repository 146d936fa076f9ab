"""The worker: opens its queues, claims, runs, keeps, settles, and stops in good order.

The parts and their files: `claiming` takes leases by free `slots`; `execute` leads each attempt
through its life, in the loop or by `handlers`; `settling` sends what finished in batches; `keeper`
holds the leases meanwhile; `upkeep` tidies the queue; `serving` wires these for one queue. This
file starts them all, waits, and takes them apart again by the rules of `draining`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from tenure.core.errors import TenureError, UsageError
from tenure.worker.config import Settings, capacity
from tenure.worker.draining import Drain, Stopping, signals
from tenure.worker.execute import Executor
from tenure.worker.handlers import Crew
from tenure.worker.holding import Ending, Held
from tenure.worker.hosting import host
from tenure.worker.identity import identity
from tenure.worker.keeper import Keeper, KeeperThread
from tenure.worker.listening import EventName, Listener, Listeners
from tenure.worker.logs import ensure_logs
from tenure.worker.metrics import Metrics
from tenure.worker.notify import Notifier
from tenure.worker.serving import Service
from tenure.worker.slots import Slots
from tenure.worker.source import Opener, Source, opener_of
from tenure.worker.task import Task, Tasks, is_child
from tenure.worker.tracing import OtelTracer
from tenure.worker.watching import Watch

log = structlog.get_logger("tenure.worker")

_KEEPER_SILENCE_S = 5.0


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is. `stores` says for every queue whether its store answers."""

    state: str
    ready: bool
    keeper_alive: bool
    slots_used: int
    slots_total: int
    unsettled: int
    stores: dict[str, bool]


class Worker:
    """Runs the jobs of one or many queues, whatever their contracts.

    `queues` are URLs, or functions that open a queue: each is opened twice, once for the keeper.
    `run` blocks until SIGTERM or SIGINT; `serve` does the same inside a running loop, without
    touching signals, until `stop`. A worker serves once.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        queues: Sequence[str | Opener],
        concurrency: int | None = None,
        settings: Settings | None = None,
        burst: bool = False,
        registry: CollectorRegistry | None = None,
        rng: Random | None = None,
    ) -> None:
        if isinstance(queues, str) or not queues:
            raise UsageError('queues is a list of queue URLs, such as ["memory://demo"]')
        self.settings = _merged(settings or Settings(), concurrency, burst)
        worker_id = self.settings.worker_id or identity()
        self.id = str(worker_id)
        self.registry = registry or CollectorRegistry()
        self.watch = Watch()
        self.state = "new"
        self._tasks = Tasks(tasks)
        self._openers = [opener_of(queue, worker_id) for queue in queues]
        self._rng = rng or Random()
        self._tracer = OtelTracer(self.id) if self.settings.tracing else None
        self._capacity = capacity(self.settings, self._tasks.kinds)
        self._slots = Slots(self._capacity.slots, batch_max=self.settings.claim_batch_max)
        self._metrics = Metrics(self.registry, lambda: (self._slots.used, self._slots.total))
        self._stopping = Stopping()
        self._notifier = Notifier(self.settings.notify_socket)
        self._services: list[Service] = []
        self._loops: list[asyncio.Task[None]] = []
        self._claimers: list[asyncio.Task[None]] = []
        self._keeper_thread: KeeperThread | None = None
        self._listeners = Listeners()
        self._drained = True
        self._fault: BaseException | None = None
        self._ready = False

    # the public face ----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until told to stop; returns the exit code: 0 after a clean drain."""
        if is_child.is_set():
            return 0  # a handler's process imports the file that made this worker
        return host(self._serve_with_signals(), uvloop=self.settings.uvloop)

    async def serve(self) -> int:
        """Serve until `stop`; cancelling it is like pulling the plug: nothing more is written."""
        if is_child.is_set():
            return 0
        if self.state != "new":
            raise UsageError("a worker serves once; make another one")
        ensure_logs()
        self.state = "serving"
        self._loop = asyncio.get_running_loop()
        self._open()
        try:
            await self._start()
            await self._stopping.drain.wait()
            clean = await self._drain()
        except BaseException:
            self.abort()
            raise
        finally:
            await self._close()
        return 0 if clean and self._fault is None else 1

    def stop(self, *, at_once: bool = False) -> None:
        """Drain; with `at_once` hand everything back without waiting. Safe from any thread."""
        self._in_loop(partial(self._stopping.ask, at_once=at_once))

    def on(self, event: EventName, listener: Listener) -> None:
        """Call `listener` when something happens; see `worker.listening` for the events."""
        self._listeners.add(event, listener)

    @property
    def concurrency(self) -> int:
        """How many jobs run at once. It can be set while the worker runs, from any thread."""
        return self._slots.total

    @concurrency.setter
    def concurrency(self, slots: int) -> None:
        if slots < 1:
            raise UsageError(f"concurrency is at least 1, not {slots}; pause() stops the worker")
        self.settings = replace(self.settings, concurrency=slots)
        self._capacity = capacity(self.settings, self._tasks.kinds)
        self._in_loop(self._resize)

    def pause(self) -> None:
        """Claim no more jobs, those that run end; other workers go on. Safe from any thread."""
        self._in_loop(partial(self._pause, True))

    def resume(self) -> None:
        """Claim jobs again. Safe from any thread."""
        self._in_loop(partial(self._pause, False))

    def abort(self) -> None:
        """Stop dead, as if the process had been killed: nothing is written any more."""
        self.state = "aborted"
        for attempt in list(self._executor.running.values()):
            attempt.held.concluded = True
            attempt.held.end_timer()
            if attempt.held.runner is not None:
                attempt.held.runner.cancel()
        for each in (*self._claimers, *self._loops):
            each.cancel()

    def health(self) -> Health:
        """For a health endpoint and the watchdog."""
        return Health(
            state=self.state,
            ready=self._ready,
            keeper_alive=self._keeper_alive(),
            slots_used=self._slots.used,
            slots_total=self._slots.total,
            unsettled=sum(len(service.source.held) for service in self._services),
            stores={each.source.name: each.source.contact.answers for each in self._services},
        )

    def _in_loop(self, call: Callable[[], None]) -> None:
        if self.state == "new" or _running_loop() is self._loop:
            call()
        else:
            self._loop.call_soon_threadsafe(call)

    def _resize(self) -> None:
        self._slots.resize(self._capacity.slots)
        if self.state != "new":
            self._crew.resize(self._capacity)
        for service in self._services:
            service.source.tell_slots(self._slots.total)

    def _pause(self, paused: bool) -> None:
        if paused != self._slots.paused:
            self._slots.pause(paused)
            self._listeners.tell("paused" if paused else "resumed")

    # starting -----------------------------------------------------------------------------------

    async def _serve_with_signals(self) -> int:
        with signals(self._stopping.press):
            return await self.serve()

    def _open(self) -> None:
        threaded = self.settings.keeper_threaded
        self._clock = time.monotonic if threaded else self._loop.time
        self._crew = Crew(self._capacity, worker_id=self.id, rng=self._rng)
        self._executor = Executor(
            self._tasks,
            slots=self._slots,
            ways=self._crew,
            metrics=self._metrics,
            watch=self.watch,
            clock=self._clock,
            rng=self._rng,
            worker_id=self.id,
            cancel_grace_ms=self.settings.cancel_grace_ms,
            unknown_task_ms=self.settings.unknown_task_ms,
            tracer=self._tracer,
            debug=self.settings.debug,
            listeners=self._listeners,
        )
        self._services = [self._service(name, opener) for name, opener in self._openers]
        self.watch.hooks.append(self._heard)

    def _service(self, name: str, opener: Opener) -> Service:
        threaded = self.settings.keeper_threaded
        return Service(
            name,
            opener,
            executor=self._executor,
            slots=self._slots,
            settings=self.settings,
            clock=self._clock,
            rng=self._rng,
            watch=self.watch,
            post=self._post_from_thread if threaded else self._end,
            told=self._told_from_thread if threaded else self.watch.tell,
            nudge=self._nudge,
            quarantined=self._metrics.quarantined,
        )

    async def _start(self) -> None:
        log.info(
            "worker starts",
            worker_id=self.id,
            queues=[name for name, _ in self._openers],
            slots=self._slots.total,
        )
        if self.settings.keeper_threaded:
            self._start_keeper_thread()
        else:
            for service in self._services:
                self._spawn(service.keeper.run(service.source.queue))
        if self.settings.burst:
            await self._tidy_first()
        for service in self._services:
            for each in service.loops():
                self._spawn(each)
            self._claimers.append(self._spawn(service.claimer.run()))
        if self.settings.watchdog_ms:
            self._spawn(self._feed_watchdog())

    def _start_keeper_thread(self) -> None:
        keepers = [(service.keeper, service.opener) for service in self._services]
        self._keeper_thread = KeeperThread(keepers, self._keeper_died)
        self._keeper_thread.start()

    def _keeper_died(self, error: BaseException) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._break, error)

    def _spawn(self, loop: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(loop)
        task.add_done_callback(self._watch_loop)
        self._loops.append(task)
        return task

    def _watch_loop(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        """A part that dies of an error is a bug, unless the store refused what it asked for:

        better stop in order than limp on.
        """
        self._fault = error
        if isinstance(error, TenureError):
            log.error("the store refuses to serve this worker; stopping", error=str(error))
        else:
            log.error("a part of the worker died; stopping", error=repr(error), exc_info=error)
        self._stopping.ask()

    async def _tidy_first(self) -> None:
        """Burst mode ends at the first empty claim, so what is due must be promoted before it."""
        rounds = (service.source.queue.upkeep() for service in self._services)
        await asyncio.gather(*rounds, return_exceptions=True)

    # what the parts tell ------------------------------------------------------------------------

    def _heard(self, name: str, _count: int) -> None:
        if name == "dry" and self.settings.burst:
            self._stop_when_empty()
        if name in ("claimed", "dry"):
            drained, self._drained = self._drained, name == "dry"
            if self._drained and not drained:
                self._listeners.tell("drained")
        if name == "stopped":
            self._listeners.tell("closed")
        if name == "contact" and not self._ready:
            self._ready = all(service.source.contact.ever for service in self._services)
            if self._ready:
                self._notifier.ready(f"serving {len(self._services)} queues")
                self.watch.tell("ready")
                self._listeners.tell("ready")

    def _end(self, source: Source, held: Held, why: Ending) -> None:
        attempt = source.held.get(held)
        if attempt is not None:
            self._executor.end(attempt, why)

    def _nudge(self, keeper: Keeper) -> None:
        if self._keeper_thread is not None:
            self._keeper_thread.nudge(keeper)
        else:
            keeper.nudge()

    def _post_from_thread(self, source: Source, held: Held, why: Ending) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            self._loop.call_soon_threadsafe(self._end, source, held, why)

    def _told_from_thread(self, name: str, count: int) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.watch.tell, name, count)

    def _keeper_alive(self) -> bool:
        thread = self._keeper_thread
        if thread is not None and not thread.alive:
            return False
        now = self._clock()
        return all(now - service.keeper.beat < _KEEPER_SILENCE_S for service in self._services)

    async def _feed_watchdog(self) -> None:
        while True:
            if self._keeper_alive():
                self._notifier.watchdog()
            await asyncio.sleep(self.settings.watchdog_ms / 2000)

    def _stop_when_empty(self) -> None:
        """Burst: done when claims sent after the last event came back empty and nothing runs."""
        seen = self.watch.activity
        dry = all(service.claimer.dry_at == seen for service in self._services)
        if dry and not any(service.source.held for service in self._services):
            self._stopping.ask()

    # stopping -----------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        self.state = "draining"
        self._notifier.stopping()
        drain = Drain(self._executor, self._services, self._slots, self.settings, self.watch)
        return await drain.run(self._claimers, self._stopping)

    async def _close(self) -> None:
        for each in self._loops:
            each.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._keeper_thread is not None:
            await self._keeper_thread.stop()
        self._crew.close()
        closing = (service.source.queue.close() for service in self._services)
        await asyncio.gather(*closing, return_exceptions=True)
        self._notifier.close()
        self.state = "stopped"
        self.watch.tell("stopped")
        log.info("worker stopped", worker_id=self.id)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _merged(settings: Settings, concurrency: int | None, burst: bool) -> Settings:
    """The arguments of `Worker` that have a name of their own, over the settings."""
    changes: dict[str, Any] = {}
    if concurrency is not None:
        changes["concurrency"] = concurrency
    if burst:
        changes["burst"] = True
    return replace(settings, **changes) if changes else settings
