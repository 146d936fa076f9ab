"""Quotas of keys: rate, unfinished jobs, body size, event streams; and limits on failed logins.

The settings of the gateway are the default quota; `tenure keys create` and `tenure keys limit` set
another one for a key. Rates and streams are counted per process: with N gateways a key gets N times
as many. The store counts unfinished jobs.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Annotated

import msgspec
import structlog
from starlette.types import Scope

from tenure.core.endpoint import Submits
from tenure.core.errors import StoreError
from tenure.core.job import NewJob, Submitted
from tenure.dashboard.api import ROUTE
from tenure.gateway.problems import Problem

_log = structlog.get_logger("tenure.gateway")

_BUCKETS_MAX = 10_000
_FULL_RETRY_MS = 2_000
_RECOUNT_S = 10.0
_COUNT_EVERY_S = 1.0
_COUNT_SHARE = 20  # counting takes at most a twentieth of the time


_Limit = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Quota(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The limits of one key. 0 means no limit, None the limit of the settings."""

    rate_per_s: Annotated[float, msgspec.Meta(ge=0)] | None = None
    rate_burst: _Limit | None = None
    depth: _Limit | None = None
    body_bytes: _Limit | None = None
    streams: _Limit | None = None
    transcodes: _Limit | None = None

    def over(self, default: Quota) -> Quota:
        """These limits, and those of `default` where this quota has None."""
        own = {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }
        return msgspec.structs.replace(default, **own)


def read_quota(raw: bytes | str, key_id: str) -> Quota:
    """A stored quota; an unreadable one counts as the default."""
    try:
        return msgspec.json.decode(raw, type=Quota)
    except (ValueError, RecursionError) as error:
        _log.error("quota_unreadable", key_id=key_id, error=str(error))
        return Quota()


def raised_by(option: str, setting: str) -> str:
    """The sentence that says how the operator raises a limit."""
    return f"the operator raises it with `tenure keys limit KEY_ID {option}` or {setting}"


def _too_fast(per_s: float, burst: int) -> str:
    return f"this key may make {per_s:g} requests a second and {burst} at once; " + raised_by(
        "--rate", "gateway.rate_per_s"
    )


class RateLimit:
    """A token bucket per requester: `rate_per_s` on average and `rate_burst` at once.

    Only the most recently used buckets are kept, which bounds the memory.
    """

    def __init__(
        self,
        *,
        code: str = "rate_limited",
        says: Callable[[float, int], str] = _too_fast,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._code = code
        self._says = says
        self._clock_s = clock_s
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, requester: str, quota: Quota) -> None:
        """Take one token, or raise `Problem` 429 with the time until the next one."""
        per_s = quota.rate_per_s
        if not per_s:
            return
        burst = quota.rate_burst or max(1, math.ceil(per_s))
        now = self._clock_s()
        tokens, filled_s = self._buckets.get(requester, (float(burst), now))
        tokens = min(burst, tokens + (now - filled_s) * per_s)
        if tokens < 1:
            wait_s = max(1, math.ceil((1 - tokens) / per_s))
            raise Problem(self._code, self._says(per_s, burst), retry_after_s=wait_s)
        self._buckets[requester] = (tokens - 1, now)
        self._buckets.move_to_end(requester)
        if len(self._buckets) > _BUCKETS_MAX:
            self._buckets.popitem(last=False)


@lru_cache(maxsize=4096)
def origin_of(host: str) -> str:
    """The part of an address that is limited: of IPv6 the /64, all of which one host may own.

    >>> [origin_of(host) for host in ("10.0.0.1", "::ffff:10.0.0.1", "2001:db8::5", "")]
    ['10.0.0.1', '10.0.0.1', '2001:db8::/64', '']
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host  # a unix socket has no address
    mapped = getattr(address, "ipv4_mapped", None)
    if mapped or address.version == 4:
        return str(mapped or address)
    return str(ipaddress.ip_network((address, 64), strict=False))


LOG_QUOTA = Quota(rate_per_s=1 / 60, rate_burst=1)


class FailedLogins:
    """Logs failed logins, and limits them per address and per key id.

    A valid key is always accepted, so an attacker cannot lock out its owner or others behind the
    same address. That is safe, because a secret of 256 random bits cannot be guessed at any rate.
    """

    def __init__(self, per_min: int, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._quota = Quota(rate_per_s=per_min / 60, rate_burst=per_min)
        self._addresses, self._keys, self._log_lines = (
            RateLimit(code="login_limited", says=lambda *_: "", clock_s=clock_s) for _ in range(3)
        )

    def note(self, address: str, key_id: str, way: str) -> None:
        """Log one failure, or raise `Problem` 429 when there were too many."""
        origin = origin_of(address)
        try:
            self._addresses.take(origin, self._quota)
            if key_id:
                self._keys.take(key_id, self._quota)
        except Problem:
            self._log_limited(origin, address, key_id, way)
            raise
        _log.warning("login_failed", address=address, key=key_id, way=way)

    def _log_limited(self, origin: str, address: str, key_id: str, way: str) -> None:
        """Log at most once a minute per address, so that failures do not flood the log."""
        with suppress(Problem):
            self._log_lines.take(origin, LOG_QUOTA)
            _log.warning("login_limited", address=address, key=key_id, way=way)


_FAILURES_QUOTA = Quota(rate_per_s=1 / 60, rate_burst=5)


class FailureLog:
    """Logs failed requests: five lines at once and one a minute for each cause and address.

    So clients that send the same request again and again do not flood the log.
    """

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._lines = RateLimit(clock_s=clock_s)

    def log(self, error: Exception, code: str, scope: Scope, request_id: str) -> None:
        """Log one failure; `code` is that of its problem, "" for an unexpected exception."""
        client = scope.get("client")
        cause = code or f"{type(error).__name__} {scope.get(ROUTE, '')}"
        with suppress(Problem):
            self._lines.take(f"{cause} {origin_of(client[0] if client else '')}", _FAILURES_QUOTA)
            _log.error(
                "request_failed",
                request_id=request_id,
                path=scope["path"],
                exc_info=None if code else error,
                error=str(error),
            )


class StreamLimit:
    """Limits the open event streams of a requester; the anonymous local caller has no limit."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @contextmanager
    def slot(self, requester: str, most: int | None) -> Iterator[None]:
        """Hold one slot while a stream is open, or raise `Problem` 429."""
        if requester and most and self._open[requester] >= most:
            raise Problem(
                "too_many_streams",
                f"at most {most} event streams may be open with this key; "
                + raised_by("--streams", "gateway.streams_per_key"),
                retry_after_s=1,
            )
        self._open[requester] += 1
        try:
            yield
        finally:
            self._open[requester] -= 1
            if not self._open[requester]:
                del self._open[requester]


class _Depth:
    """The known number of unfinished jobs of one requester.

    `jobs` is the last count of the store plus `added`, the submits since that count began. `sent`
    is the number of submits without an answer yet, which a count may or may not include. At the
    limit, the store is asked again only after `recount_s`.
    """

    __slots__ = ("added", "counted_s", "jobs", "recount_s", "sent", "task")

    def __init__(self) -> None:
        self.jobs = self.added = self.sent = 0
        self.counted_s = self.recount_s = -math.inf
        self.task: asyncio.Task[None] | None = None


class DepthLimit:
    """A `submit` that refuses jobs of requesters at their limit of unfinished jobs.

    The store counts in the background, every ten seconds for a requester that submits. A submit
    waits for a count only if its requester would exceed the limit. A gateway does not see what
    other gateways submitted since the last count. `unfinished` counts the jobs of a requester.
    """

    def __init__(
        self,
        queue: Submits,
        unfinished: Callable[[str, int], Awaitable[int]],
        quota: Callable[[str], Quota],
        refused: Callable[[], None],
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue = queue
        self._unfinished = unfinished
        self._quota = quota
        self._refused = refused
        self._clock_s = clock_s
        self._depths: dict[str, _Depth] = {}

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Like the queue's `submit`; jobs beyond the quota are answered `full` and not sent."""
        sent: list[NewJob] = []
        refusals: list[Submitted | None] = []
        depths = []
        try:
            for job in jobs:
                most = self._quota(job.requester).depth if job.requester else None
                depth = await self._room(job.requester, most) if most else _UNLIMITED
                if depth is None:
                    self._refused()
                    why = f"this key has {most} unfinished jobs, its limit; "
                    why += raised_by("--depth", "gateway.depth_per_key")
                    refusals.append(Submitted("", "full", why, _FULL_RETRY_MS))
                    continue
                depth.sent += 1
                depths.append(depth)
                sent.append(job)
                refusals.append(None)
            answers = iter(await self._queue.submit(sent) if sent else ())
        finally:
            for depth in depths:
                depth.sent -= 1
        return [refusal or next(answers) for refusal in refusals]

    async def _room(self, requester: str, most: int) -> _Depth | None:
        """The depth of a requester with one job added; None if that would exceed the limit."""
        depth = self._depths.get(requester)
        if depth is None:
            if len(self._depths) >= _BUCKETS_MAX:
                self._depths.clear()
            depth = self._depths[requester] = _Depth()
        now_s = self._clock_s()
        if now_s - depth.counted_s > _RECOUNT_S:
            self._recount(requester, depth, most)
        if depth.jobs >= most:
            if now_s > depth.recount_s:
                self._recount(requester, depth, most)
            if depth.task is not None:
                await asyncio.shield(depth.task)
                took_s = self._clock_s() - now_s
                depth.recount_s = self._clock_s() + max(_COUNT_EVERY_S, _COUNT_SHARE * took_s)
        if depth.jobs >= most:
            return None
        depth.jobs += 1
        depth.added += 1
        return depth

    def _recount(self, requester: str, depth: _Depth, most: int) -> None:
        if depth.task is None:
            depth.added, depth.counted_s = depth.sent, self._clock_s()
            depth.task = asyncio.create_task(self._count(requester, depth, most))

    async def _count(self, requester: str, depth: _Depth, most: int) -> None:
        try:
            counted = await self._unfinished(requester, most)
        except StoreError as error:
            # The submit itself will fail and report that the store does not answer.
            _log.warning("unfinished jobs were not counted", key=requester, error=str(error))
        else:
            depth.jobs = counted + depth.added
        finally:
            depth.task = None


_UNLIMITED = _Depth()
