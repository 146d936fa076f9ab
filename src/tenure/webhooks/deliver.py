"""The handler of the outbox queue: each attempt signs and sends one event."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tenure.core.lease import Lease
from tenure.core.outcome import Fatal, Retry, Signal, Snooze
from tenure.core.retry import RetryPolicy, delay_ms, exponential, retry_after_ms
from tenure.egress import Client, Disconnected, EgressError, Limits, Refused, Response
from tenure.egress.guard import read_target
from tenure.webhooks.signing import EndpointSecrets, Rotating, live_keys, new_nonce, signed_headers
from tenure.webhooks.slots import Turns

RETRY = exponential(5_000, factor=4.0, max_attempts=10, delay_ms_max=6 * 3_600_000)
"""5 s, 20 s, 80 s, 5 min, 21 min, 85 min, 6 h ...: about a day in all."""
CROWDED = exponential(60_000, factor=4.0, max_attempts=10, delay_ms_max=6 * 3_600_000)
"""For 429: begins with a minute."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How long to wait: after an ordinary failure, and (in a larger bucket) after 429."""

    ordinary: RetryPolicy = RETRY
    crowded: RetryPolicy = CROWDED


PACE = Pace()

_GONE, _CROWDED, _OK, _REDIRECT = 410, 429, 200, 300


def signal_of(
    status: int,
    headers: Mapping[str, str],
    *,
    attempt: int,
    chance: float,
    now_s: float,
    pace: Pace = PACE,
) -> Signal | None:
    """None when delivered, else how the attempt ends."""
    if _OK <= status < _REDIRECT:
        return None
    if status == _CROWDED:
        return _again(pace.crowded, "429", headers, attempt, chance, now_s)
    if status == _GONE:
        return Fatal("the receiver answered 410: it wants no more of these", code="http_410")
    return _again(pace.ordinary, str(status), headers, attempt, chance, now_s)


def _again(
    policy: RetryPolicy,
    status: str,
    headers: Mapping[str, str],
    attempt: int,
    chance: float,
    now_s: float,
) -> Retry:
    wait_ms = max(
        delay_ms(policy, attempt, chance), retry_after_ms(headers.get("retry-after", ""), now_s)
    )
    return Retry(wait_ms / 1000, f"the receiver answered {status}", code=f"http_{status}")


_PAUSE_S_MAX = 300.0
_ORIGINS_MAX = 10_000


@dataclass(slots=True)
class _State:
    pause_s: float
    failures: int = 0
    until_s: float = 0.0


class Breaker:
    """What is known of the origins that failed of late."""

    def __init__(self, *, failures_min: int = 5, pause_s: float = 10.0) -> None:
        self._failures_min = failures_min
        self._pause_s = pause_s
        self._states: OrderedDict[str, _State] = OrderedDict()

    def wait_s(self, origin: str, now_s: float) -> float:
        """0 when a delivery may be tried now; the first to ask after a pause is the one to try."""
        state = self._states.get(origin)
        if state is None or state.failures < self._failures_min:
            return 0.0
        if now_s < state.until_s:
            return state.until_s - now_s
        state.until_s = now_s + state.pause_s  # the others wait for what this one finds
        return 0.0

    def untried(self, origin: str, now_s: float) -> None:
        """The delivery that was let through was put off for another reason: the next one tries."""
        state = self._states.get(origin)
        if state is not None and state.failures >= self._failures_min:
            state.until_s = now_s

    def worked(self, origin: str) -> None:
        """It answered."""
        self._states.pop(origin, None)

    def failed(self, origin: str, now_s: float) -> None:
        """It did not answer, or with an error of its own."""
        state = self._states.setdefault(origin, _State(self._pause_s))
        state.failures += 1
        if state.failures > self._failures_min:
            state.pause_s = min(state.pause_s * 2, _PAUSE_S_MAX)
        state.until_s = now_s + state.pause_s
        self._states.move_to_end(origin)
        if len(self._states) > _ORIGINS_MAX:
            self._states.popitem(last=False)


LIMITS = Limits(connect_ms=5_000, total_ms=15_000, body_bytes_max=16_384)
TIMEOUT_S = 25.0
"""For the task: longer than any exchange, and far shorter than any lease that is being kept."""
_PUT_OFF_MS_MAX = 86_400_000


@dataclass(frozen=True, slots=True)
class Delivery:
    """What goes out. `body` is the event, a JSON object that holds `event_id` too."""

    event_id: str
    url: str
    requester_id: str
    body: bytes


def outbox_delivery(lease: Lease) -> Delivery:
    """The delivery that an outbox lease stands for; its `extra` begins with requester and URL."""
    extra = lease.extra
    if not (isinstance(extra, tuple | list) and len(extra) > 1 and extra[1]):
        raise Fatal(f"event {lease.job_id} does not say where to deliver it", code="no_url")
    return Delivery(lease.job_id, str(extra[1]), str(extra[0]), lease.payload)


class Running(Protocol):
    """What a delivery needs of its job."""

    @property
    def attempt(self) -> int:
        """1 for the first start."""

    @property
    def lease(self) -> Lease:
        """The lease, for the event as it was stored."""


def delivery_handler(
    client: Client,
    secrets: EndpointSecrets,
    *,
    address: Callable[[Lease], Delivery] = outbox_delivery,
    standard: bool = False,
    pace: Pace = PACE,
    breaker: Breaker | None = None,
    turns: Turns | None = None,
    clock: Callable[[], float] = time.time,
    chance: Callable[[], float] = random.random,
) -> Callable[[Running], Awaitable[dict[str, Any]]]:
    """The handler. `standard` adds the Standard Webhooks headers to the contract's four."""
    courier = _Courier(
        client=client,
        secrets=secrets,
        address=address,
        standard=standard,
        pace=pace,
        breaker=breaker or Breaker(),
        turns=turns or Turns(),
        rotating=Rotating(),
        clock=clock,
        chance=chance,
    )

    async def deliver(job: Running) -> dict[str, Any]:
        return await courier.deliver(job)

    return deliver


class _Unsigned(Exception):
    """There is nothing to sign with; a secret may be made before the last attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Courier:
    client: Client
    secrets: EndpointSecrets
    address: Callable[[Lease], Delivery]
    standard: bool
    pace: Pace
    breaker: Breaker
    turns: Turns
    rotating: Rotating
    clock: Callable[[], float]
    chance: Callable[[], float]

    async def deliver(self, job: Running) -> dict[str, Any]:
        delivery = self.address(job.lease)
        origin = self._may_try(job, delivery)
        try:
            async with self.turns.turn(delivery.requester_id, delivery.url):
                started_s = self.clock()
                answer = await self._sent(delivery)
        except Snooze:
            self.breaker.untried(origin, self.clock())
            raise
        except Refused as error:
            raise Fatal(f"not delivered: {error}", code=error.code) from None
        except _Unsigned:
            wait_ms = delay_ms(self.pace.ordinary, job.attempt, self.chance())
            words = "not delivered: the requester has no webhook secret (yet)"
            raise Retry(wait_ms / 1000, words, code="no_secret") from None
        except EgressError as error:
            self.breaker.failed(origin, self.clock())
            wait_ms = delay_ms(self.pace.ordinary, job.attempt, self.chance())
            words = f"not delivered: {error}"
            raise Retry(wait_ms / 1000, words, code=error.code) from None
        now_s = self.clock()
        if answer.status >= 500:
            self.breaker.failed(origin, now_s)
        else:
            self.breaker.worked(origin)
        signal = signal_of(
            answer.status,
            answer.headers,
            attempt=job.attempt,
            chance=self.chance(),
            now_s=now_s,
            pace=self.pace,
        )
        if signal is not None:
            raise signal
        return {"status": answer.status, "ms": round((now_s - started_s) * 1000)}

    def _may_try(self, job: Running, delivery: Delivery) -> str:
        try:
            origin = read_target(delivery.url).origin
        except Refused as error:
            raise Fatal(f"not delivered: {error}", code=error.code) from None
        now_s = self.clock()
        wait_s = self.breaker.wait_s(origin, now_s)
        old = now_s * 1000 - job.lease.created_ms > _PUT_OFF_MS_MAX
        if wait_s and not (old and job.lease.created_ms):  # no event is put off for ever
            raise Snooze(wait_s * (1 + self.chance() / 4), f"{origin} has been failing")
        return origin

    async def _sent(self, delivery: Delivery) -> Response:
        live = await live_keys(self.secrets, delivery.requester_id)
        if not live:
            raise _Unsigned

        async def send(keys: Sequence[bytes]) -> Response:
            try:
                return await self._attempt(delivery, keys)
            except Disconnected as error:
                if not error.stale:
                    raise
            return await self._attempt(delivery, keys)  # anew: the old nonce may have been taken

        receiver = f"{delivery.requester_id} {delivery.url}"
        return await self.rotating.send(receiver, live, send)

    async def _attempt(self, delivery: Delivery, live: Sequence[bytes]) -> Response:
        body = delivery.body
        headers = signed_headers(
            live,
            event_id=delivery.event_id,
            body=body,
            now_s=int(self.clock()),
            nonce=new_nonce(),
            standard=self.standard,
        )
        headers += [("Content-Type", "application/json"), ("User-Agent", "tenure-webhooks/1")]
        return await self.client.send(
            "POST", delivery.url, headers=headers, body=body, limits=LIMITS
        )
