"""Bodies of requests: JSON whose numbers every reader downstream can take."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from starlette.requests import ClientDisconnect

from tenure.gateway.http.body import BodyBudget, BodyQueue, decode, decoded, read_body
from tenure.gateway.problems import Problem


class Body(msgspec.Struct):
    payload: msgspec.Raw


class Counted(Body):
    count: int = 0


class Name:
    def __init__(self, text: str) -> None:
        self.text = text


class HeldBody(msgspec.Struct):
    name: Name


def read(number: str) -> Body:
    raw = f'{{"payload":{{"a":{number}}}}}'.encode()
    body: Body = decode(msgspec.json.Decoder(Body), raw)
    return body


@pytest.mark.parametrize(
    "number", ["1e999", "9" * 250 + "e99", "9" * 210 + "E+99", "9" * 299 + "e10", "1.5e0999"]
)
def test_a_number_that_no_double_holds_is_refused(number: str) -> None:
    with pytest.raises(Problem) as raised:
        read(number)
    assert raised.value.code == "bad_number"


@pytest.mark.parametrize("number", ["1e99", "9" * 199 + "e99", "0." + "9" * 250, "9" * 250])
def test_a_large_number_that_a_double_holds_is_kept(number: str) -> None:
    assert float(msgspec.json.decode(bytes(read(number).payload))["a"]) == float(number)


def test_a_deep_body_of_the_wrong_shape_with_bytes_that_are_no_text_is_refused() -> None:
    raw = b'{"other":"\xb4","deep":' + b"[" * 140 + b"]" * 140 + b"}"
    with pytest.raises(Problem) as raised:
        decode(msgspec.json.Decoder(list[int]), raw)
    assert raised.value.code == "bad_json"


def test_members_that_are_no_fields_are_not_walked() -> None:
    members = ",".join(f'"k{number}":1.0' for number in range(80_000))
    raw = f'{{"payload":1,"count":1.0,{members}}}'.encode()
    decoder = msgspec.json.Decoder(Counted)

    def took_s(read: Callable[[], object]) -> float:
        begun = time.perf_counter()
        read()
        return time.perf_counter() - begun

    read_s = min(took_s(lambda: decode(decoder, raw)) for _ in range(3))
    plain_s = min(took_s(lambda: msgspec.json.decode(raw)) for _ in range(3))
    assert decode(decoder, raw).count == 1
    assert read_s < 2 * plain_s


class Held:
    """What a body holds in the tests of `BodyQueue`: its name, once the test lets it be read."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.open = threading.Event()
        self.decoder = msgspec.json.Decoder(HeldBody, dec_hook=self._hook)

    def _hook(self, kind: type, value: Any) -> Name:
        self.open.wait(30)
        self.read.append(value)
        return Name(value)

    def body(self, name: str) -> bytes:
        return f'{{"name":"{name}"}}'.encode() + b" " * (64 * 1024)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)  # the condition is what another task counts


async def test_large_bodies_of_one_caller_hold_up_no_other_and_their_number_is_bounded() -> None:
    held, line = Held(), BodyQueue("test", 16)
    of_one = [
        asyncio.create_task(line.decoded(held.decoder, held.body("one"), "one", None))
        for _ in range(16)
    ]
    await until(lambda: line.places["one"] == 16)
    with pytest.raises(Problem) as raised:
        await line.decoded(held.decoder, held.body("one"), "one", None)
    assert raised.value.code == "rate_limited"
    assert ("retry-after", "1") in raised.value.headers
    other = asyncio.create_task(line.decoded(held.decoder, held.body("other"), "other", None))
    await until(lambda: line.places["other"] == 1)
    held.open.set()
    await asyncio.gather(other, *of_one)
    assert held.read.index("other") <= 3
    assert not line.places


async def test_all_callers_together_have_a_bounded_number_of_large_bodies() -> None:
    held, line = Held(), BodyQueue("test", 16)
    bodies = [
        asyncio.create_task(line.decoded(held.decoder, held.body("a"), f"key{number}", None))
        for number in range(256)
    ]
    await until(lambda: line.places.total() == 256)
    with pytest.raises(Problem) as raised:
        await line.decoded(held.decoder, held.body("b"), "late", None)
    assert raised.value.code == "busy"
    held.open.set()
    await asyncio.gather(*bodies)


async def test_a_large_body_whose_client_left_is_not_read() -> None:
    held, line, left = Held(), BodyQueue("test", 16), asyncio.Event()
    first = asyncio.create_task(line.decoded(held.decoder, held.body("first"), "a", None))

    async def gone() -> None:
        await left.wait()

    others = [
        asyncio.create_task(line.decoded(held.decoder, held.body("gone"), "a", gone))
        for _ in range(5)
    ]
    await until(lambda: line.places["a"] == 6)
    left.set()
    await until(lambda: line.places["a"] == 1)
    held.open.set()
    await first
    assert held.read == ["first"]
    assert all(isinstance(task.exception(), ClientDisconnect) for task in others)


async def test_large_bodies_of_workers_do_not_wait_for_those_of_clients() -> None:
    held = Held()
    client = asyncio.create_task(decoded(held.decoder, held.body("client"), who="a"))
    raw = b'{"payload":1}' + b" " * (64 * 1024)
    async with asyncio.timeout(10):
        await decoded(msgspec.json.Decoder(Body), raw, who="w", works=True)
    assert not client.done()
    held.open.set()
    await client


async def chunks(*parts: bytes) -> Any:
    for part in parts:
        yield {"type": "http.request", "body": part, "more_body": True}
    await asyncio.Event().wait()  # the rest never comes


def slow_body(budget: BodyBudget, who: str, size: int) -> asyncio.Task[bytes]:
    """A request whose body stops after `size` bytes."""
    messages = chunks(*[b"x" * 1_000] * (size // 1_000))

    async def read() -> bytes:
        with budget.hold(who) as hold:
            return await read_body(messages.__anext__, {}, 1 << 20, 60_000, hold)

    return asyncio.create_task(read())


async def test_the_bodies_of_a_key_that_are_under_way_have_a_budget() -> None:
    budget = BodyBudget(per_caller=10_000, of_all=25_000)
    slow = [slow_body(budget, "one", 5_000) for _ in range(2)]
    await until(lambda: budget.held["one"] == 10_000)
    with pytest.raises(Problem) as refused:
        await slow_body(budget, "one", 1_000)
    assert refused.value.code == "rate_limited"
    assert {("retry-after", "1"), ("connection", "close")} <= set(refused.value.headers)
    slow.append(slow_body(budget, "other", 10_000))
    await until(lambda: budget.held["other"] == 10_000)
    with pytest.raises(Problem) as refused:
        await slow_body(budget, "third", 6_000)
    assert refused.value.code == "busy"
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert (budget.total, dict(budget.held)) == (0, {})
