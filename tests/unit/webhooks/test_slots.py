"""How many deliveries go out at once, and how few of them to slow receivers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from tenure.core.outcome import Snooze
from tenure.webhooks.slots import DeliverySlots
from tests.waiting import until

pytestmark = pytest.mark.clause("I-49")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


async def known_as_quick(slots: DeliverySlots, *urls: str) -> None:
    for url in urls:
        async with slots.slot("acme", url):
            pass


def held(slots: DeliverySlots, requester: str, url: str) -> asyncio.Task[None]:
    """A delivery to a receiver that does not answer."""

    async def deliver() -> None:
        async with slots.slot(requester, url):
            await asyncio.Event().wait()

    return asyncio.create_task(deliver())


async def ended(deliveries: list[asyncio.Task[None]]) -> None:
    for each in deliveries:
        each.cancel()
    await asyncio.gather(*deliveries, return_exceptions=True)


async def known_as_slow(slots: DeliverySlots, clock: Clock, *receivers: tuple[str, str]) -> None:
    for requester, url in receivers:
        async with slots.slot(requester, url):
            clock.now_s += 3.0


async def test_a_new_receiver_is_tried_with_one_request() -> None:
    slots = DeliverySlots(5)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(slots.slot("acme", "https://a/hook?x=1"))
        await stack.enter_async_context(slots.slot("acme", "https://b/hook"))
        with pytest.raises(Snooze) as caught:  # at once: another one is tried, too
            await stack.enter_async_context(slots.slot("acme", "https://a/hook?x=2"))
        assert 500 <= caught.value.after_ms <= 750
        assert not slots._waiting


async def test_the_first_answer_of_a_new_receiver_is_waited_for() -> None:
    slots = DeliverySlots(5)
    begun = asyncio.Event()
    answered = asyncio.Event()

    async def deliver() -> None:
        async with slots.slot("acme", "https://new"):
            begun.set()
            await answered.wait()

    deliveries = [asyncio.create_task(deliver()) for _ in range(20)]
    await begun.wait()
    answered.set()
    await asyncio.gather(*deliveries)


async def test_deliveries_come_back_soon_when_a_new_receiver_takes_long() -> None:
    slots = DeliverySlots(5)
    deliveries = [held(slots, "acme", "https://new") for _ in range(20)]
    await until(lambda: sum(each.done() for each in deliveries) == 19, "one is left")
    signals = [each.exception() for each in deliveries if each.done()]
    assert {type(each) for each in signals} == {Snooze}
    # Not one by one: it may be quick.
    assert max(each.after_ms for each in signals if isinstance(each, Snooze)) <= 750
    await ended(deliveries)


async def test_one_requester_gets_two_and_all_slow_ones_three() -> None:
    clock = Clock()
    slots = DeliverySlots(5, clock=clock)
    slow = [("acme", f"https://s{n}") for n in range(3)]
    slow += [("other", "https://s3"), ("third", "https://s4")]
    await known_as_slow(slots, clock, *slow)
    async with AsyncExitStack() as stack:
        for n in range(2):
            await stack.enter_async_context(slots.slot("acme", f"https://s{n}"))
        with pytest.raises(Snooze):
            await stack.enter_async_context(slots.slot("acme", "https://s2"))
        await stack.enter_async_context(slots.slot("other", "https://s3"))
        with pytest.raises(Snooze):
            await stack.enter_async_context(slots.slot("third", "https://s4"))


async def test_the_urls_of_one_origin_are_one_receiver() -> None:
    slots = DeliverySlots(5, clock=Clock())
    await known_as_quick(slots, "https://quick/jobs/1?x=1")
    async with AsyncExitStack() as stack:
        for n in range(2, 6):
            await stack.enter_async_context(slots.slot("acme", f"https://QUICK:443/jobs/{n}"))


@pytest.mark.parametrize("requester", ["acme", "new"])
async def test_a_new_receiver_is_tried_beside_slow_ones(requester: str) -> None:
    clock = Clock()
    slots = DeliverySlots(5, clock=clock)
    slow = [("acme", "https://s0"), ("acme", "https://s1"), ("other", "https://s2")]
    await known_as_slow(slots, clock, *slow)
    async with AsyncExitStack() as stack:
        for each in slow:
            await stack.enter_async_context(slots.slot(*each))
        clock.now_s += 5.0
        async with slots.slot(requester, "https://new"):
            pass
        for _ in range(3):  # it has answered at once: it is quick
            async with slots.slot(requester, "https://new"):
                pass


async def test_eight_new_receivers_that_do_not_answer_are_tried_side_by_side() -> None:
    slots = DeliverySlots(5)
    loop = asyncio.get_running_loop()
    began = loop.time()
    deliveries = [held(slots, f"r{n % 2}", f"https://s{n}") for n in range(8)]
    await until(lambda: len(slots._under_way) == 5, "five are tried")
    await until(lambda: sum(each.done() for each in deliveries) == 5, "three go on, as slow ones")
    assert loop.time() - began < 8 * 0.5
    assert len(slots._under_way) == 3
    async with asyncio.timeout(5), slots.slot("new", "https://quick"):
        pass
    await ended(deliveries)


async def test_new_receivers_leave_a_place_to_other_requesters_and_to_quick_receivers() -> None:
    slots = DeliverySlots(5)
    await known_as_quick(slots, "https://quick")
    quick = held(slots, "acme", "https://quick")
    await until(lambda: len(slots._under_way) == 1)
    deliveries = [held(slots, "big", f"https://s{n}") for n in range(5)]
    deliveries.append(held(slots, "small", "https://s5"))
    await asyncio.sleep(0)
    assert [each.receiver.requester for each in slots._under_way] == ["acme", *["big"] * 4]
    await ended([quick])
    await asyncio.sleep(0)
    assert [each.receiver.requester for each in slots._under_way] == [*["big"] * 4, "small"]
    await ended(deliveries)


async def test_a_quick_receiver_has_a_place_beside_the_slow_ones() -> None:
    clock = Clock()
    slots = DeliverySlots(5, clock=clock)
    slow = [(f"r{n}", f"https://s{n}") for n in range(3)]
    await known_as_slow(slots, clock, *slow)
    await known_as_quick(slots, "https://quick")
    async with AsyncExitStack() as stack:
        for each in slow:
            await stack.enter_async_context(slots.slot(*each))
        for _ in range(2):
            await stack.enter_async_context(slots.slot("acme", "https://quick"))


async def test_a_quick_receiver_waits_for_its_turn_and_leaves_one_place() -> None:
    slots = DeliverySlots(3, clock=Clock())
    await known_as_quick(slots, "https://quick", "https://other")
    order = []

    async def deliver() -> None:
        async with slots.slot("acme", "https://quick"):
            order.append("third")

    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(slots.slot("acme", "https://quick"))
        third = asyncio.create_task(deliver())
        async with slots.slot("acme", "https://other"):
            order.append("other")
        assert not third.done()
    await third
    assert order == ["other", "third"]


async def test_one_requester_leaves_a_place_to_another_that_waits() -> None:
    """Its receivers are quick, and so many that no receiver has more than its share."""
    slots = DeliverySlots(3, clock=Clock())
    urls = [f"https://quick{n}" for n in range(4)]
    await known_as_quick(slots, *urls)
    async with slots.slot("other", "https://theirs"):
        pass
    order: list[str] = []
    ends = [asyncio.Event() for _ in range(8)]

    async def deliver(requester: str, url: str, end: asyncio.Event) -> None:
        async with slots.slot(requester, url):
            order.append(requester)
            await end.wait()

    flood = [asyncio.create_task(deliver("acme", urls[n % 4], ends[n])) for n in range(6)]
    await until(lambda: len(order) == 3, "alone it has all places")
    theirs = asyncio.create_task(deliver("other", "https://theirs", ends[6]))
    await asyncio.sleep(0)
    ends[0].set()
    await until(lambda: len(order) == 4, "a place was freed")
    assert order[3] == "other", "and is not for those who have most of them"
    for end in ends:
        end.set()
    await asyncio.gather(theirs, *flood)


async def test_the_deliveries_of_a_requester_at_once_are_a_setting() -> None:
    slots = DeliverySlots(5, per_requester=2, clock=Clock())
    urls = [f"https://quick{n}" for n in range(4)]
    await known_as_quick(slots, *urls)
    async with AsyncExitStack() as stack:
        for url in urls[:2]:
            await stack.enter_async_context(slots.slot("acme", url))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05), slots.slot("acme", urls[2]):
                raise AssertionError("the third of a requester that may have two")
        async with slots.slot("other", urls[2]):
            pass
    async with slots.slot("acme", urls[2]):
        pass


async def test_deliveries_that_are_put_off_come_back_one_by_one() -> None:
    clock = Clock()
    slots = DeliverySlots(5, clock=clock)
    async with slots.slot("acme", "https://slow"):
        clock.now_s += 8.0
    waits = []
    async with AsyncExitStack() as stack:
        for _ in range(2):
            await stack.enter_async_context(slots.slot("acme", "https://slow"))
        for _ in range(200):
            with pytest.raises(Snooze) as caught:
                await stack.enter_async_context(slots.slot("acme", "https://slow"))
            waits.append(caught.value.after_ms)
    assert waits[:7] == [4_000, 8_000, 12_000, 16_000, 20_000, 24_000, 28_000]
    assert max(waits) == 600_000
    assert len(set(waits)) == 150, "a large backlog does not come back all at once"


async def test_a_receiver_that_becomes_quick_is_held_back_no_more() -> None:
    clock = Clock()
    slots = DeliverySlots(5, clock=clock)
    async with slots.slot("acme", "https://slow"):
        clock.now_s += 3.0
    for _ in range(3):
        await known_as_quick(slots, "https://slow")
    async with AsyncExitStack() as stack:
        for _ in range(4):
            await stack.enter_async_context(slots.slot("acme", "https://slow"))
        clock.now_s += 2.0  # these take long again
        with pytest.raises(Snooze):
            await stack.enter_async_context(slots.slot("acme", "https://slow"))


async def test_a_delivery_that_is_ended_while_it_waits_leaves_its_place_to_others() -> None:
    slots = DeliverySlots(1, clock=Clock())
    await known_as_quick(slots, "https://quick")

    async def deliver() -> None:
        async with slots.slot("acme", "https://quick"):
            pass

    async with slots.slot("acme", "https://quick"):
        waiting = [asyncio.create_task(deliver()) for _ in range(2)]
        await until(lambda: len(slots._waiting) == 2, "both wait")
        waiting[0].cancel()
    await waiting[1]
    assert waiting[0].cancelled()
