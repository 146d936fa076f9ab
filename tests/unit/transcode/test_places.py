"""Whose ffmpeg runs next: each requester leaves a place to the others, and they take turns."""

from __future__ import annotations

import asyncio

from tenure.transcode.handler import FfmpegPlaces


class Runs:
    """Starts holders of places, and ends them by name."""

    def __init__(self, parallel: int) -> None:
        self.places = FfmpegPlaces(parallel)
        self.running: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def start(self, *names: str) -> list[str]:
        """Start holders, whose requester is their first letter (`-` is none); all that run."""
        for name in names:
            self._ends[name] = asyncio.Event()
            self.tasks[name] = asyncio.create_task(self._hold(name))
        return await self._settled()

    async def end(self, name: str) -> list[str]:
        self._ends[name].set()
        await self.tasks.pop(name)
        return await self._settled()

    async def _hold(self, name: str) -> None:
        async with self.places.place(name[0].strip("-")):
            self.running.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.running.remove(name)

    async def _settled(self) -> list[str]:
        for _ in range(5):  # nothing here waits for anything but the other tasks
            await asyncio.sleep(0)
        return sorted(self.running)

    async def close(self) -> None:
        for task in self.tasks.values():
            task.cancel()
        await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        assert self.running == []


async def test_one_requester_leaves_a_place_even_while_nobody_else_waits() -> None:
    runs = Runs(4)
    assert await runs.start("a1", "a2", "a3", "a4") == ["a1", "a2", "a3"]
    assert await runs.start("b1") == ["a1", "a2", "a3", "b1"]
    assert await runs.end("b1") == ["a1", "a2", "a3"]
    assert await runs.end("a2") == ["a1", "a3", "a4"]
    await runs.close()


async def test_a_free_place_goes_to_the_one_with_fewest_and_equals_take_turns() -> None:
    runs = Runs(3)
    assert await runs.start("a1", "a2", "b1", "a3", "a4", "b2", "c1") == ["a1", "a2", "b1"]
    assert await runs.end("a1") == ["a2", "b1", "c1"], "c has none, and came last"
    assert await runs.end("a2") == ["a3", "b1", "c1"]
    assert await runs.start("c2") == ["a3", "b1", "c1"]
    assert await runs.end("b1") == ["a3", "b2", "c1"]
    await runs.close()
    runs = Runs(2)
    assert await runs.start("a1", "b1", "a2", "a3", "a4", "c1") == ["a1", "b1"]
    assert await runs.end("a1") == ["a2", "b1"]
    assert await runs.end("a2") == ["b1", "c1"], "a had its turn"
    await runs.close()


async def test_who_gives_up_waiting_or_is_cancelled_holds_no_place() -> None:
    runs = Runs(2)
    assert await runs.start("a1", "b1", "c1", "d1") == ["a1", "b1"]
    runs._ends["a1"].set()
    await asyncio.wait([runs.tasks["a1"]])  # the place was just given to c1, which has not run
    runs.tasks["c1"].cancel()
    assert await runs._settled() == ["b1", "d1"]
    assert await runs.start("e1", "f1") == ["b1", "d1"]
    runs.tasks["e1"].cancel()
    assert await runs.end("b1") == ["d1", "f1"]
    await runs.close()


async def test_a_single_place_goes_to_all_in_the_order_they_came() -> None:
    runs = Runs(1)
    assert await runs.start("a1", "a2", "b1") == ["a1"]
    assert await runs.end("a1") == ["a2"]
    assert await runs.end("a2") == ["b1"]
    await runs.close()


async def test_jobs_without_a_requester_may_have_all_places() -> None:
    runs = Runs(2)
    assert await runs.start("-1", "-2", "-3") == ["-1", "-2"]
    await runs.close()
