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
from tenure.egress import Client, Disconnected, EgressError, Limits, RequestRefused, Response
from tenure.egress.guard import read_target
from tenure.webhooks.signing import (
    EndpointSecrets,
    KeyRotation,
    live_keys,
    new_nonce,
    signed_headers,
)
from tenure.webhooks.slots import DeliverySlots

RETRY = exponential(5_000, factor=4.0, max_attempts=10, delay_ms_max=6 * 3_600_000)
"""5 s, 20 s, 80 s, 5 min, 21 min, 85 min, 6 h ...: about a day in all."""
_RATE_LIMITED_RETRY = exponential(60_000, factor=4.0, max_attempts=10, delay_ms_max=6 * 3_600_000)
"""After 429: starts with a minute."""


@dataclass(frozen=True, slots=True)
class RetryPolicies:
    """The delays after a failure, and the longer ones after 429."""

    default: RetryPolicy = RETRY
    rate_limited: RetryPolicy = _RATE_LIMITED_RETRY


_RETRIES = RetryPolicies()

_OK, _REDIRECT, _GONE, _TOO_MANY_REQUESTS = 200, 300, 410, 429


def signal_of(
    status: int,
    headers: Mapping[str, str],
    *,
    attempt: int,
    jitter: float,
    now_s: float,
    retries: RetryPolicies = _RETRIES,
) -> Signal | None:
    """None for a 2xx status, else the signal that ends the attempt."""
    if _OK <= status < _REDIRECT:
        return None
    if status == _TOO_MANY_REQUESTS:
        return _retry(retries.rate_limited, "429", headers, attempt, jitter, now_s)
    if status == _GONE:
        return Fatal("the receiver answered 410: it wants no more of these", code="http_410")
    return _retry(retries.default, str(status), headers, attempt, jitter, now_s)


def _retry(
    policy: RetryPolicy,
    status: str,
    headers: Mapping[str, str],
    attempt: int,
    jitter: float,
    now_s: float,
) -> Retry:
    wait_ms = max(
        delay_ms(policy, attempt, jitter), retry_after_ms(headers.get("retry-after", ""), now_s)
    )
    return Retry(wait_ms / 1000, f"the receiver answered {status}", code=f"http_{status}")


_PAUSE_S_MAX = 300.0
_RECEIVERS_MAX = 10_000


@dataclass(slots=True)
class _ReceiverState:
    pause_s: float
    failures: int = 0
    until_s: float = 0.0


class CircuitBreaker:
    """Delays deliveries to receivers that have failed several times in a row.

    A receiver is a requester and an origin, as in `DeliverySlots`: what one requester's URLs answer
    says nothing about those of another on the same host.
    """

    def __init__(self, *, failures_min: int = 5, pause_s: float = 10.0) -> None:
        self._failures_min = failures_min
        self._pause_s = pause_s
        self._states: OrderedDict[tuple[str, str], _ReceiverState] = OrderedDict()

    def wait_s(self, receiver: tuple[str, str], now_s: float) -> float:
        """0 if a delivery may be tried now. After a pause, only the first caller gets 0."""
        state = self._states.get(receiver)
        if state is None or state.failures < self._failures_min:
            return 0.0
        if now_s < state.until_s:
            return state.until_s - now_s
        state.until_s = now_s + state.pause_s  # the others wait for the result of this trial
        return 0.0

    def release_trial(self, receiver: tuple[str, str], now_s: float) -> None:
        """The trial delivery was snoozed for another reason, so the next one may try."""
        state = self._states.get(receiver)
        if state is not None and state.failures >= self._failures_min:
            state.until_s = now_s

    def record_success(self, receiver: tuple[str, str]) -> None:
        """The receiver answered."""
        self._states.pop(receiver, None)

    def record_failure(self, receiver: tuple[str, str], now_s: float) -> None:
        """The receiver did not answer, or with a 5xx status."""
        state = self._states.setdefault(receiver, _ReceiverState(self._pause_s))
        state.failures += 1
        if state.failures > self._failures_min:
            state.pause_s = min(state.pause_s * 2, _PAUSE_S_MAX)
        state.until_s = now_s + state.pause_s
        self._states.move_to_end(receiver)
        if len(self._states) > _RECEIVERS_MAX:
            self._states.popitem(last=False)


LIMITS = Limits(connect_ms=5_000, total_ms=15_000, body_bytes_max=16_384)
TIMEOUT_S = 25.0
"""Of the task: longer than any exchange, and far shorter than a lease that is extended."""
_SNOOZED_MS_MAX = 86_400_000


@dataclass(frozen=True, slots=True)
class _WebhookDelivery:
    """A webhook to send. `body` is the event, a JSON object that also has `event_id`."""

    event_id: str
    url: str
    requester_id: str
    body: bytes


def _outbox_delivery(lease: Lease) -> _WebhookDelivery:
    """The delivery of an outbox lease; raises `Fatal` if it has no URL."""
    if not lease.webhook_url:
        raise Fatal(f"event {lease.job_id} does not say where to deliver it", code="no_url")
    return _WebhookDelivery(lease.job_id, lease.webhook_url, lease.requester, lease.payload)


class DeliveryJob(Protocol):
    """What the handler needs of its job."""

    @property
    def attempt(self) -> int:
        """The number of this attempt, from 1."""

    @property
    def lease(self) -> Lease:
        """The lease, which has the stored event."""


def delivery_handler(
    client: Client,
    secrets: EndpointSecrets,
    *,
    standard: bool = False,
    retries: RetryPolicies = _RETRIES,
    breaker: CircuitBreaker | None = None,
    slots: DeliverySlots | None = None,
) -> Callable[[DeliveryJob], Awaitable[dict[str, Any]]]:
    """The handler of the outbox queue. `standard` adds the Standard Webhooks headers."""
    handler = _DeliveryHandler(
        client=client,
        secrets=secrets,
        standard=standard,
        retries=retries,
        breaker=breaker or CircuitBreaker(),
        slots=slots or DeliverySlots(),
        rotation=KeyRotation(),
    )

    async def deliver(job: DeliveryJob) -> dict[str, Any]:
        return await handler.deliver(job)

    return deliver


class _NoSecret(Exception):
    """The requester has no secret; it may create one before the last attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _DeliveryHandler:
    client: Client
    secrets: EndpointSecrets
    standard: bool
    retries: RetryPolicies
    breaker: CircuitBreaker
    slots: DeliverySlots
    rotation: KeyRotation

    async def deliver(self, job: DeliveryJob) -> dict[str, Any]:
        delivery = _outbox_delivery(job.lease)
        receiver = self._check_breaker(job, delivery)
        try:
            async with self.slots.slot(delivery.requester_id, delivery.url):
                started_s = time.time()
                answer = await self._send(delivery)
        except Snooze:
            self.breaker.release_trial(receiver, time.time())
            raise
        except RequestRefused as error:
            raise Fatal(f"not delivered: {error}", code=error.code) from None
        except _NoSecret:
            wait_ms = delay_ms(self.retries.default, job.attempt, random.random())
            message = "not delivered: the requester has no webhook secret (yet)"
            raise Retry(wait_ms / 1000, message, code="no_secret") from None
        except EgressError as error:
            self.breaker.record_failure(receiver, time.time())
            wait_ms = delay_ms(self.retries.default, job.attempt, random.random())
            raise Retry(wait_ms / 1000, f"not delivered: {error}", code=error.code) from None
        now_s = time.time()
        if answer.status >= 500:
            self.breaker.record_failure(receiver, now_s)
        else:
            self.breaker.record_success(receiver)
        signal = signal_of(
            answer.status,
            answer.headers,
            attempt=job.attempt,
            jitter=random.random(),
            now_s=now_s,
            retries=self.retries,
        )
        if signal is not None:
            raise signal
        return {"status": answer.status, "ms": round((now_s - started_s) * 1000)}

    def _check_breaker(self, job: DeliveryJob, delivery: _WebhookDelivery) -> tuple[str, str]:
        """The receiver of the delivery; raises `Snooze` while it fails."""
        try:
            origin = read_target(delivery.url).origin
        except RequestRefused as error:
            raise Fatal(f"not delivered: {error}", code=error.code) from None
        receiver, now_s = (delivery.requester_id, origin), time.time()
        wait_s = self.breaker.wait_s(receiver, now_s)
        old = now_s * 1000 - job.lease.created_ms > _SNOOZED_MS_MAX
        if wait_s and not (old and job.lease.created_ms):  # an old event is tried anyway
            raise Snooze(wait_s * (1 + random.random() / 4), f"{origin} has been failing")
        return receiver

    async def _send(self, delivery: _WebhookDelivery) -> Response:
        live = await live_keys(self.secrets, delivery.requester_id)
        if not live:
            raise _NoSecret

        async def send(keys: Sequence[bytes]) -> Response:
            try:
                return await self._attempt(delivery, keys)
            except Disconnected as error:
                if not error.stale:
                    raise
            return await self._attempt(delivery, keys)  # with a new nonce: the old may be used

        receiver = f"{delivery.requester_id} {delivery.url}"
        return await self.rotation.send(receiver, live, send)

    async def _attempt(self, delivery: _WebhookDelivery, live: Sequence[bytes]) -> Response:
        body = delivery.body
        headers = signed_headers(
            live,
            event_id=delivery.event_id,
            body=body,
            now_s=int(time.time()),
            nonce=new_nonce(),
            standard=self.standard,
        )
        headers += [("Content-Type", "application/json"), ("User-Agent", "tenure-webhooks/1")]
        return await self.client.send(
            "POST", delivery.url, headers=headers, body=body, limits=LIMITS
        )
