"""The network between nodes and the store: it delays, loses requests and loses answers.

A request that was sent is on its own: it arrives even if its sender is killed, and even after the
sender has stopped waiting for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from tenure.contracts.memory import SharedStore
from tenure.contracts.memory.store import MemoryStore
from tenure.core.errors import ReplyLost, ServerError, StoreUnreachable, TenureError
from tests.chaos.sim.loop import THE_WORLD

T = TypeVar("T")


@dataclass(frozen=True)
class Weather:
    """How likely what is, and how long things take."""

    request_lost: float = 0.0
    answer_lost: float = 0.0
    late: float = 0.0
    delay_s_max: float = 0.01
    late_s_max: float = 3.0
    timeout_s: float = 0.6


CALM = Weather()


class Network:
    """Carries steps to the store. `weather` may change; `cut` off, nothing gets through."""

    def __init__(self, loop: asyncio.AbstractEventLoop, shared: SharedStore, rng: Random) -> None:
        self._loop = loop
        self._shared = shared
        self._rng = rng
        self.weather = CALM
        self.cut = False
        self.closed = False
        self.lost = 0
        self.errors: list[BaseException] = []

    async def __call__(self, operation: str, step: Callable[[MemoryStore], T], /) -> T:
        weather, chance = self.weather, self._rng.random()
        if self.closed or (self.cut and chance < 0.5):
            raise StoreUnreachable(f"{operation}: no route to the store")
        answer: asyncio.Future[T] = self._loop.create_future()
        timer = self._loop.call_later(weather.timeout_s, _give_up, answer, operation)
        if self.cut or chance < weather.request_lost:
            self.lost += 1
        else:
            self._send(answer, step, lose=chance < weather.request_lost + weather.answer_lost)
        try:
            return await answer
        finally:
            timer.cancel()

    def _send(
        self, answer: asyncio.Future[T], step: Callable[[MemoryStore], T], *, lose: bool
    ) -> None:
        def arrive() -> None:
            value, error = self._execute(step)
            if lose:
                self.lost += 1
                return
            self._loop.call_later(
                self._delay_s(), _deliver, answer, value, error, context=THE_WORLD
            )

        self._loop.call_later(self._delay_s(), arrive, context=THE_WORLD)

    def _execute(self, step: Callable[[MemoryStore], Any]) -> tuple[Any, TenureError | None]:
        try:
            return self._shared.run(step), None
        except Exception as error:
            self.errors.append(error)
            return None, ServerError(f"the store answered: {error!r}")

    def _delay_s(self) -> float:
        weather = self.weather
        if self._rng.random() < weather.late:
            return self._rng.random() * weather.late_s_max
        return self._rng.random() * weather.delay_s_max


def _give_up(answer: asyncio.Future[Any], operation: str) -> None:
    if not answer.done():
        answer.set_exception(ReplyLost(f"no answer to {operation} in time"))


def _deliver(answer: asyncio.Future[Any], value: Any, error: TenureError | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(value)
    else:
        answer.set_exception(error)
