"""Group commit by itself: who travels together, when a second call goes, that nobody is left."""

from __future__ import annotations

import asyncio

import pytest

from tenure.store.batcher import SECOND_CALL_WEIGHT, Batcher, TooManyWaiting, Turns


class Slow:
    """A database that answers when it is told to."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.go = asyncio.Semaphore(0)

    async def send(self, items: list[int]) -> list[int]:
        self.calls.append(items)
        await self.go.acquire()
        return [-item for item in items]


async def _turn() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.clause("P-19")
async def test_what_comes_while_a_call_is_under_way_travels_together() -> None:
    slow = Slow()
    gathering = Batcher(slow.send, items_max=10, calls_max=2)
    first = asyncio.create_task(gathering([1]))
    await _turn()
    rest = [asyncio.create_task(gathering([n])) for n in (2, 3, 4)]
    await _turn()
    assert slow.calls == [[1]]
    slow.go.release()
    slow.go.release()
    assert await asyncio.gather(first, *rest) == [[-1], [-2], [-3], [-4]]
    assert slow.calls == [[1], [2, 3, 4]]


@pytest.mark.clause("P-19")
async def test_a_heavy_load_gets_a_call_beside_the_first() -> None:
    slow = Slow()
    gathering = Batcher(slow.send, items_max=500, calls_max=2, weigh=lambda item: item)
    asking = [
        asyncio.create_task(gathering([n])) for n in (1, SECOND_CALL_WEIGHT, SECOND_CALL_WEIGHT)
    ]
    await _turn()
    assert slow.calls == [[1, SECOND_CALL_WEIGHT, SECOND_CALL_WEIGHT]]
    asking += [asyncio.create_task(gathering([n])) for n in (2, SECOND_CALL_WEIGHT)]
    await _turn()
    assert slow.calls[1:] == [[2, SECOND_CALL_WEIGHT]], "beside the first, and no third one"
    for _ in range(3):
        slow.go.release()
    await asyncio.gather(*asking)


@pytest.mark.clause("P-19")
async def test_who_comes_just_when_the_last_call_ends_is_not_left_behind() -> None:
    """Asked from within the answer: the call is over, and its task has not been taken away yet."""
    slow = Slow()
    gathering = Batcher(slow.send, items_max=10, calls_max=1)

    async def twice(number: int) -> list[int]:
        return await gathering([number]) + await gathering([10 * number])

    for _ in range(8):
        slow.go.release()
    async with asyncio.timeout(5):
        assert await asyncio.gather(twice(1), twice(2)) == [[-1, -10], [-2, -20]]


@pytest.mark.clause("P-22")
async def test_an_error_is_told_to_everybody_in_the_call() -> None:
    async def send(items: list[int]) -> list[int]:
        raise ConnectionError("gone")

    gathering = Batcher(send, items_max=10, calls_max=1)
    told = await asyncio.gather(gathering([1]), gathering([2]), return_exceptions=True)
    assert [str(each) for each in told] == ["gone", "gone"]


async def test_what_goes_together_is_bounded_in_number_and_size() -> None:
    slow = Slow()
    gathering = Batcher(slow.send, items_max=3, size_max=10, measure=lambda item: item)
    asking = [asyncio.create_task(gathering([n])) for n in (1, 1, 1, 1, 8, 2, 99, 1)]
    for _ in range(10):
        slow.go.release()
    await asyncio.gather(*asking)
    assert slow.calls == [[1, 1, 1], [1, 8], [2], [99], [1]]


@pytest.mark.parametrize("drops_gone", [True, False])
async def test_who_has_gone_before_the_call_is_left_out_only_where_that_is_wished(
    drops_gone: bool,
) -> None:
    slow = Slow()
    gathering = Batcher(slow.send, items_max=2, drops_gone=drops_gone)
    first = asyncio.create_task(gathering([1]))
    await _turn()
    gone, *rest = (asyncio.create_task(gathering([n])) for n in (2, 3, 4))
    await _turn()
    gone.cancel()
    for _ in range(3):
        slow.go.release()
    await asyncio.gather(first, *rest)
    assert slow.calls == ([[1], [3, 4]] if drops_gone else [[1], [2, 3], [4]])


class Tenants:
    """A database for items of tenants; an item is its tenant's letter and a number."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.go = asyncio.Semaphore(0)

    async def send(self, items: list[str]) -> list[str]:
        self.calls.append(items)
        await self.go.acquire()
        return items


async def test_callers_take_turns_whoever_came_first() -> None:
    slow = Tenants()
    batcher = Batcher(slow.send, items_max=4, caller_of=lambda item: item[0])
    asking = [asyncio.create_task(batcher([f"a{n}"])) for n in range(9)]
    await _turn()
    asking += [asyncio.create_task(batcher([item])) for item in ("b0", "b1", "c0")]
    await _turn()
    for _ in range(4):
        slow.go.release()
    await asyncio.gather(*asking)
    assert slow.calls == [
        ["a0", "a1", "a2", "a3"],
        ["b0", "c0", "a4", "b1"],
        ["a5", "a6", "a7", "a8"],
    ]


async def test_a_caller_waits_for_one_long_list_of_another_at_most() -> None:
    slow = Tenants()
    batcher = Batcher(slow.send, items_max=10, caller_of=lambda item: item[0])
    lists = [[f"a{n}"] * 48 for n in range(5)]
    asking = [asyncio.create_task(batcher(items)) for items in lists]
    await _turn()
    asking += [asyncio.create_task(batcher([item])) for item in ("b0", "c0")]
    await _turn()
    for _ in range(6):
        slow.go.release()
    await asyncio.gather(*asking)
    assert slow.calls == [lists[0], ["b0", "c0"], *lists[1:]]


async def test_what_waits_of_a_caller_is_bounded_and_only_its_own() -> None:
    slow = Tenants()
    batcher = Batcher(slow.send, items_max=2, caller_of=lambda item: item[:1], waiting_max=5)
    asking = [asyncio.create_task(batcher(["a"] * 9))]
    await _turn()
    asking += [asyncio.create_task(batcher(["a"] * 2)) for _ in range(2)]
    await _turn()
    with pytest.raises(TooManyWaiting) as refused:
        await batcher(["a", "a"])
    assert refused.value.weight == 4
    asking += [asyncio.create_task(batcher(items)) for items in (["a"], ["b"] * 9, [""] * 4)]
    asking += [asyncio.create_task(batcher([""] * 4))]
    for _ in range(9):
        slow.go.release()
    answers = await asyncio.gather(*asking)
    assert [len(answer) for answer in answers] == [9, 2, 2, 1, 9, 4, 4]
    assert await batcher(["a"] * 5) == ["a"] * 5, "there is room again"


async def test_calls_of_one_caller_take_turns_and_those_of_another_do_not_wait() -> None:
    turns, go = Turns(1, waiting_max=2), asyncio.Event()
    running: list[str] = []

    async def call(who: str) -> None:
        async with turns.of(who):
            running.append(who)
            await go.wait()

    calls = [asyncio.create_task(call("a")) for _ in range(3)]
    await _turn()
    with pytest.raises(TooManyWaiting):
        await call("a")
    calls += [asyncio.create_task(call(who)) for who in ("b", "", "")]
    await _turn()
    assert running == ["a", "b", "", ""]
    calls.pop(1).cancel()  # one that waits leaves
    go.set()
    await asyncio.gather(*calls)
    assert sorted(running) == ["", "", "a", "a", "b"]
    async with turns.of("a"):
        pass
