"""The handler of the outbox queue: one attempt at one event, signed anew.

    deliver = delivery_handler(Client(Guard(policy)), secrets)
    Worker([task("*", retry=RETRY, timeout_s=TIMEOUT_S)(deliver)], queues=[outbox])

In the outbox the event is the job: its id is the event's, its payload is the body, which goes out
byte for byte as it was stored. Every attempt carries the same event under the same id; timestamp
and nonce are new each time.
Nothing of the receiver's answer but its status is kept: it is a stranger's text.
"""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tenure.core.lease import Lease
from tenure.core.outcome import Fatal, Retry, Snooze
from tenure.core.retry import delay_ms
from tenure.egress import Client, Disconnected, EgressError, Limits, Refused, Response
from tenure.egress.target import read_target
from tenure.webhooks.answers import PACE, RETRY, Pace, signal_of
from tenure.webhooks.breaker import Breaker
from tenure.webhooks.rotating import Rotating
from tenure.webhooks.secrets import EndpointSecrets, live_keys
from tenure.webhooks.signing import new_nonce, signed_headers
from tenure.webhooks.turns import Turns

LIMITS = Limits(connect_ms=5_000, total_ms=15_000, body_bytes_max=16_384)
TIMEOUT_S = 25.0
"""For the task: longer than any exchange, and far shorter than any lease that is being kept."""
_PUT_OFF_MS_MAX = 86_400_000

__all__ = ["RETRY", "TIMEOUT_S", "Delivery", "EndpointSecrets", "Running", "delivery_handler"]


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
