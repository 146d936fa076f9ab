"""The worker: starts the parts that serve its queues, and stops them in order.

`claim` takes as many leases as there are free slots. `attempt` runs the handler of each, in the
loop or in `pools`. `settle` sends outcomes in batches. Meanwhile `keeper` extends the leases. A
worker stops in two steps:

    first SIGTERM or SIGINT   no more claims; handlers may finish for `drain_ms`; then they are
                              cancelled and their leases handed back
    second one                everything is handed back at once
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import msgspec
import structlog
from prometheus_client import CollectorRegistry

from tenure.core.errors import TenureError, UsageError
from tenure.worker.attempt import Executor
from tenure.worker.claim import (
    ClaimLoop,
    Context,
    NamedOpener,
    Opener,
    Slots,
    Source,
    named_openers,
)
from tenure.worker.config import Settings, capacity, identity
from tenure.worker.events import (
    EventName,
    Health,
    Listener,
    Listeners,
    Metrics,
    Notifier,
    Watch,
)
from tenure.worker.job import Attempt, Lifespan, Middleware, StopReason, through
from tenure.worker.keeper import Keeper, KeeperThread
from tenure.worker.plans import keep_schedules
from tenure.worker.pools import HandlerPools
from tenure.worker.task import Task, Tasks, is_child, where_children_find
from tenure.worker.telemetry import Tracer, ensure_logs, mark_records

log = structlog.get_logger("tenure.worker")

_KEEPER_SILENCE_S = 5.0


class _Service(msgspec.Struct, frozen=True, eq=False):
    """The parts that serve one queue."""

    opener: Opener
    source: Source
    keeper: Keeper
    claimer: ClaimLoop


class Worker:
    """Runs the jobs of one or many queues, whatever their contracts.

    `queues` are URLs, or functions that open a queue: each is opened twice, once for the keeper.
    `lifespan` is a function that returns an async context manager. The worker enters it before its
    first job and leaves it after its last; handlers have its value as `job.state`. A child process
    of `process=True` handlers enters one of its own. `middleware` are functions
    `async (attempt, call_next)` around every attempt, the first one outermost.
    `run` blocks until SIGTERM or SIGINT; `serve` does the same inside a running loop, without
    touching signals, until `stop`. A worker serves once.
    """

    def __init__(
        self,
        tasks: Iterable[Task],
        *,
        queues: Sequence[str | Opener],
        lifespan: Lifespan | None = None,
        middleware: Sequence[Middleware] = (),
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
        self._middleware = tuple(middleware)
        wrap = partial(through, self._middleware) if self._middleware else None
        self._tasks = Tasks(tasks, wrap)
        self._lifespan = lifespan
        self._lifespan_of_children = where_children_find(lifespan, self._tasks.kinds)
        self._openers = named_openers(queues, worker_id)
        self._rng = rng or Random()
        self._tracer = Tracer(self.id) if self.settings.tracing else None
        self._capacity = capacity(self.settings, self._tasks.kinds)
        self._slots = Slots(self._capacity.slots, batch_max=self.settings.claim_batch_max)
        self._metrics = Metrics(self.registry, lambda: (self._slots_used, self._slots.total))
        self._stopping = Stopping()
        self._notifier = Notifier(self.settings.notify_socket)
        self._services: list[_Service] = []
        self._loops: list[asyncio.Task[None]] = []
        self._claimers: dict[ClaimLoop, asyncio.Task[None]] = {}
        self._keeper_thread: KeeperThread | None = None
        self._listeners = Listeners()
        self._drained = True
        self._fault: BaseException | None = None
        self._ready = False
        self._clock = time.monotonic

    # public -------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until SIGTERM, SIGINT or `stop`; returns the exit code: 0 after a clean drain."""
        if is_child.is_set():
            return 0  # a handler's process imports the file that made this worker
        _tune_gc()
        factory = _uvloop_factory() if self.settings.uvloop else None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(self._serve_with_signals())

    async def serve(self) -> int:
        """Serve until `stop`; if it is cancelled, nothing more is written."""
        if is_child.is_set():
            return 0
        if self.state != "new":
            raise UsageError("a worker serves once; make another one")
        ensure_logs(others="info")
        mark_records()
        self._loop = asyncio.get_running_loop()
        self.state = "starting"
        async with self._living() as state:
            self._open(state)
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
        """Drain; with `at_once` hand all jobs back without waiting. Safe from any thread."""
        self._in_loop(partial(self._stopping.request, at_once=at_once))

    def on(self, event: EventName, listener: Listener) -> None:
        """Call `listener` at an event; see `EventName` for the events and their arguments."""
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
        """Claim no more jobs; running ones and other workers go on. Safe from any thread."""
        self._in_loop(partial(self._pause, True))

    def resume(self) -> None:
        """Claim jobs again. Safe from any thread."""
        self._in_loop(partial(self._pause, False))

    def abort(self) -> None:
        """Stop as if the process had been killed: nothing more is written."""
        self.state = "aborted"
        for attempt in list(self._executor.running) if self._services else ():
            attempt.outcome_chosen = True
            attempt.end_timer()
            if attempt.runner is not None:
                attempt.runner.cancel()
        for each in self._loops:
            each.cancel()

    def health(self) -> Health:
        """For a health endpoint and the watchdog."""
        return Health(
            state=self.state,
            ready=self._ready,
            keeper_alive=self._keeper_alive(),
            slots_used=self._slots_used,
            slots_total=self._slots.total,
            unsettled=sum(len(service.source.attempts) for service in self._services),
            stores={each.source.name: each.source.contact.answers for each in self._services},
        )

    def is_live(self, *, within_s: float = 5.0) -> bool:
        """Whether event loop and keeper run. It waits for the loop, so call it from a thread."""
        if self.state in ("new", "starting"):  # a lifespan may load for long
            return True
        answered = threading.Event()
        try:
            self._loop.call_soon_threadsafe(answered.set)
        except RuntimeError:  # the loop is closed
            return False
        return answered.wait(within_s) and self._keeper_alive()

    def is_ready(self) -> bool:
        """Whether it takes jobs: all stores have answered once, and one of them still does."""
        answers = any(service.source.contact.answers for service in self._services)
        return self.state == "serving" and self._ready and answers

    @property
    def _slots_used(self) -> int:
        """How many jobs have a slot; a claim under way holds more, for jobs that may not come."""
        return len(self._executor.running) if self._services else 0

    def _in_loop(self, call: Callable[[], None]) -> None:
        if self.state == "new" or _running_loop() is self._loop:
            call()
        else:
            self._loop.call_soon_threadsafe(call)

    def _resize(self) -> None:
        self._slots.resize(self._capacity.slots)
        if self._services:
            self._pools.resize(self._capacity)
        for service in self._services:
            service.source.queue.slots = self._slots.total

    def _pause(self, paused: bool) -> None:
        if paused != self._slots.paused:
            self._slots.pause(paused)
            self._listeners.tell("paused" if paused else "resumed")

    # starting -----------------------------------------------------------------------------------

    async def _serve_with_signals(self) -> int:
        with signals(self._stopping.on_signal):
            return await self.serve()

    def _living(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """The lifespan, unless all handlers run in child processes, which have their own."""
        if self._lifespan is None or self._tasks.kinds == {"process"}:
            return contextlib.nullcontext()
        return self._lifespan()

    def _open(self, state: Any) -> None:
        self.state = "serving"
        if not self.settings.keeper_threaded:
            self._clock = self._loop.time
        self._context = Context(
            self.settings,
            self.id,
            self._clock,
            self._rng,
            self._slots,
            self.watch,
            self._listeners,
            self._metrics,
            state,
        )
        self._pools = HandlerPools(
            self._capacity,
            worker_id=self.id,
            rng=self._rng,
            middleware=self._middleware,
            lifespan=self._lifespan_of_children,
        )
        self._executor = Executor(self._tasks, self._pools, self._context, self._tracer)
        self._services = [self._service(each) for each in self._openers]
        self.watch.hooks.append(self._on_event)

    def _service(self, opener: NamedOpener) -> _Service:
        threaded = self.settings.keeper_threaded
        source = Source(
            opener.name,
            opener.open(),
            self._context,
            settled=self._executor.settled,
            dropped=self._executor.dropped,
            end=self._executor.end,
        )
        keeper = Keeper(
            source,
            self._context,
            end=self._end_from_thread if threaded else self._executor.end,
            tell=self._tell_from_thread if threaded else self.watch.tell,
        )
        nudge = partial(self._nudge, keeper)
        claimer = ClaimLoop(source, self._executor, self._context, nudge)
        return _Service(opener.open, source, keeper, claimer)

    async def _start(self) -> None:
        log.info(
            "worker starts",
            worker_id=self.id,
            queues=[each.address for each in self._openers],
            slots=self._slots.total,
        )
        if self.settings.keeper_threaded:
            self._start_keeper_thread()
        else:
            for service in self._services:
                self._spawn(service.keeper.run(service.source.queue))
        if self.settings.burst:
            await self._promote_due()
        for service in self._services:
            source = service.source
            for each in (source.settles.run(), source.reports.run(), source.run_upkeep()):
                self._spawn(each)
            self._claimers[service.claimer] = self._spawn(service.claimer.run())
            tasks = self._tasks if service is self._services[0] else None  # it gets declared ones
            self._spawn(keep_schedules(source, self._context, tasks))
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
        """Stop because a part died. That is a bug, unless the store refused what it asked for."""
        self._fault = error
        if isinstance(error, TenureError):
            log.error("the store refuses to serve this worker; stopping", error=str(error))
        else:
            log.error("a part of the worker died; stopping", error=repr(error), exc_info=error)
        self._stopping.request()

    async def _promote_due(self) -> None:
        """Promote due jobs before the first claim: burst mode ends at the first empty one."""
        rounds = (service.source.queue.upkeep() for service in self._services)
        await asyncio.gather(*rounds, return_exceptions=True)

    # events of the parts ------------------------------------------------------------------------

    def _on_event(self, name: str, _count: int) -> None:
        if name == "claim_empty" and self.settings.burst:
            self._stop_when_empty()
        if name in ("claimed", "claim_empty"):
            drained, self._drained = self._drained, name == "claim_empty"
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

    def _nudge(self, keeper: Keeper) -> None:
        if self._keeper_thread is not None:
            self._keeper_thread.nudge(keeper)
        else:
            keeper.nudge()

    def _end_from_thread(self, attempt: Attempt, why: StopReason) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._executor.end, attempt, why)

    def _tell_from_thread(self, name: str, count: int) -> None:
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
        """End a burst if claims sent after the last activity were empty and nothing runs."""
        seen = self.watch.activity
        empty = all(service.claimer.last_empty_claim == seen for service in self._services)
        if empty and not any(service.source.attempts for service in self._services):
            self._stopping.request()

    # stopping -----------------------------------------------------------------------------------

    async def _drain(self) -> bool:
        self.state = "draining"
        self._notifier.stopping()
        return await drain(self._claimers, self._executor, self._context, self._stopping)

    async def _close(self) -> None:
        for each in self._loops:
            each.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._keeper_thread is not None:
            await self._keeper_thread.stop()
        await self._pools.close(self.settings.cancel_grace_ms / 1000)
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
    """The settings, with the arguments of `Worker` that override them."""
    changes: dict[str, Any] = {}
    if concurrency is not None:
        changes["concurrency"] = concurrency
    if burst:
        changes["burst"] = True
    return replace(settings, **changes) if changes else settings


def _tune_gc() -> None:
    """Collect less often: short-lived attempts make few cycles, and a full collection is slow."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _uvloop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


# Some supervisors signal a process group and then its leader again: that counts as one signal.
_SAME_SIGNAL_S = 0.1


class Stopping:
    """The request to stop: none, drain, or release at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.release = asyncio.Event()
        self._signalled: float | None = None

    def on_signal(self) -> None:
        """A signal arrived: the first drains, a later one releases."""
        now = asyncio.get_running_loop().time()
        if self._signalled is not None and now - self._signalled < _SAME_SIGNAL_S:
            return
        self._signalled = now
        self.request(at_once=self.drain.is_set())

    def request(self, *, at_once: bool = False) -> None:
        """Stop; with `at_once` without waiting for handlers."""
        self.drain.set()
        if at_once:
            self.release.set()


@contextmanager
def signals(on_signal: Callable[[], None]) -> Generator[None]:
    """Call `on_signal` for SIGTERM and SIGINT."""
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _first_of(*events: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until one of the events is set; False after the timeout."""
    waiters = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        done, _ = await asyncio.wait(
            waiters, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)
    finally:
        for waiter in waiters:
            waiter.cancel()


async def drain(
    claimers: Mapping[ClaimLoop, asyncio.Task[None]],
    executor: Executor,
    context: Context,
    stopping: Stopping,
) -> bool:
    """Stop; True if every handler could finish and the store accepted every outcome."""
    settings, watch = context.settings, context.watch
    loop = asyncio.get_running_loop()
    deadline = loop.time() + settings.drain_ms / 1000
    watch.tell("draining")
    for claimer, running in claimers.items():
        claimer.stopping = True
        if not claimer.in_claim:
            running.cancel()
    context.slots.close()
    executor.end_unstarted()
    await _end_claims(list(claimers.values()), stopping, settings.claim_wait_ms)
    concluded = executor.all_concluded()
    left_s = max(0.0, deadline - loop.time())
    await _first_of(concluded, stopping.release, timeout_s=left_s)
    if not concluded.is_set():
        watch.tell("releasing")
        await _release(executor, concluded, stopping, settings.cancel_grace_ms)
    flushed = await _flush([claimer.source for claimer in claimers], settings.flush_ms)
    watch.tell("drained")
    return flushed and not stopping.release.is_set()


async def _end_claims(
    running: Sequence[asyncio.Task[None]], stopping: Stopping, wait_ms: int
) -> None:
    """Wait for claims in flight; their claimers hand back the leases."""
    done = asyncio.Event()
    gathered = asyncio.gather(*running, return_exceptions=True)
    gathered.add_done_callback(lambda _: done.set())
    await _first_of(done, stopping.release, timeout_s=wait_ms / 1000 + 1)
    for each in running:
        each.cancel()


async def _release(
    executor: Executor, concluded: asyncio.Event, stopping: Stopping, grace_ms: int
) -> None:
    """Cancel the running handlers and hand their leases back; at once after a second signal."""
    attempts = list(executor.running)
    log.warning("handing back unfinished jobs", jobs=len(attempts))
    for attempt in attempts:
        executor.end(attempt, "shutdown")
    await _first_of(concluded, stopping.release, timeout_s=grace_ms / 1000 + 1)
    for attempt in attempts:
        executor.conclude(attempt)


async def _flush(sources: Sequence[Source], limit_ms: int) -> bool:
    """Wait until the last outcomes are answered."""
    emptied = [
        flusher.empty() for source in sources for flusher in (source.reports, source.settles)
    ]
    try:
        flushed = all(await asyncio.wait_for(asyncio.gather(*emptied), limit_ms / 1000))
    except TimeoutError:
        flushed = False
    if not flushed:
        left = sum(source.settles.backlog for source in sources)
        log.error("stopping with outcomes the store did not take", outcomes=left)
    return flushed
