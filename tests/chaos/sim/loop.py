"""An event loop in which a seed decides everything: time, order, and who is dead or stopped.

Time is virtual: it jumps to the next timer when nothing else can run. Whatever is ready at one
moment runs in an order drawn from the seed. Every handle belongs to the node in whose context it
was made, so that a node can be killed (its handles are dropped where they stand, and no `finally`
of it ever runs) or paused (its handles are kept back, while the world goes on).
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections.abc import Coroutine
from contextvars import Context, ContextVar
from heapq import heappop
from random import Random
from typing import Any

STEPS_MAX = 100_000
THE_WORLD = Context()
"""The context of what belongs to no node: the network and the store."""


class Node:
    """One simulated process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.paused = False
        self.kept_back: list[events.Handle] = []

    def __repr__(self) -> str:
        return f"<node {self.name}>"


_node: ContextVar[Node | None] = ContextVar("simulated_node", default=None)


class Stuck(Exception):
    """Nothing is ready and no timer is set, or it would go on for ever."""


class SimLoop(asyncio.BaseEventLoop):
    """Runs one ready handle at a time, chosen by `random`."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self._random = random
        self._now = 0.0
        self._ready: list[events.Handle] = []  # type: ignore[assignment]
        self._graveyard: list[events.Handle] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._nodes: list[Node] = []
        self.steps = 0
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        return self._now

    def spawn(self, node: Node, life: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a coroutine as (part of) a node."""
        self._nodes.append(node)
        context = Context()
        context.run(_node.set, node)
        return self.create_task(life, context=context)

    def kill(self, node: Node) -> None:
        """From now on nothing of this node runs, not even its cleaning up."""
        node.alive = False
        self._graveyard += node.kept_back
        node.kept_back.clear()

    def pause(self, node: Node) -> None:
        """Stop a node where it stands, as SIGSTOP does."""
        node.paused = True

    def resume(self, node: Node) -> None:
        """Let it go on; it finds that time has passed."""
        node.paused = False
        self._ready += node.kept_back
        node.kept_back.clear()

    def bury(self) -> None:
        """After the last word: cancel every task, of the dead too, so that none is left pending."""
        self.steps = 0
        self.set_exception_handler(lambda loop, context: None)  # the dead have nothing to say
        for node in self._nodes:
            node.alive = True
            self.resume(node)
        self._ready += self._graveyard
        self._graveyard.clear()
        for _ in range(20):
            unfinished = self._unfinished()
            if not unfinished:
                return
            for task in unfinished:
                task.cancel()
            self.run_until_complete(asyncio.wait(unfinished, timeout=60))
        raise Stuck(f"tasks that do not end: {self._unfinished()}")

    def _unfinished(self) -> list[asyncio.Task[Any]]:
        return [task for task in {*self._tasks, *asyncio.all_tasks(self)} if not task.done()]

    def _make_task(
        self, loop: asyncio.AbstractEventLoop, life: Coroutine[Any, Any, Any], **how: Any
    ) -> asyncio.Task[Any]:
        """Tasks are kept: a task that is forgotten would be closed, and closing runs `finally`."""
        task = asyncio.Task(life, loop=loop, **how)
        self._tasks.append(task)
        return task

    def _run_once(self) -> None:
        timers = self._scheduled  # type: ignore[attr-defined]
        if not self._ready:
            while timers and timers[0]._cancelled:
                heappop(timers)._scheduled = False
            if not timers:
                raise Stuck("nothing is ready and no timer is set")
            self._now = max(self._now, timers[0]._when)
        while timers and timers[0]._when <= self._now:
            timer = heappop(timers)
            timer._scheduled = False
            self._ready.append(timer)
        self._step()

    def _step(self) -> None:
        ready = self._ready
        at = int(self._random.random() * len(ready))
        ready[at], ready[-1] = ready[-1], ready[at]
        handle = ready.pop()
        if handle._cancelled:
            return
        node: Node | None = handle._context.get(_node)  # type: ignore[attr-defined]
        if node is not None and not node.alive:
            self._graveyard.append(handle)
        elif node is not None and node.paused:
            node.kept_back.append(handle)
        else:
            self.steps += 1
            if self.steps > STEPS_MAX:
                raise Stuck(f"{STEPS_MAX} steps and no end")
            handle._run()

    def _process_events(self, event_list: Any) -> None:
        """There is no I/O."""

    def _write_to_self(self) -> None:
        """There is no other thread that could call."""

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        raise AssertionError(f"a simulation has no threads, but {func} was to run in one")
