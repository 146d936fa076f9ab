"""Parents and children: the shape of a flow, and what a parent learns of its children."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tenure.core.encoding import from_json
from tenure.store.redis import Redis


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """A job and the children it waits for; each may be in another queue of the same server."""

    name: str
    data: Any = None
    queue: str = ""
    options: Mapping[str, Any] = {}
    children: Sequence[Flow] = ()


class Children(msgspec.Struct, frozen=True, kw_only=True):
    """The children of a job by their keys, such as `bull:scenes:17`.

    `results` of those that completed, `failures` (the reasons) of those that failed and were to be
    ignored, `fatal` those whose failure fails the parent, `pending` those that have not ended.
    """

    results: dict[str, Any]
    failures: dict[str, str]
    fatal: list[str]
    pending: list[str]

    def __bool__(self) -> bool:
        """Whether there are any, in whatever state."""
        return bool(self.results or self.failures or self.fatal or self.pending)


async def read_children(redis: Redis, key: str) -> Children:
    """What the four keys beside a parent's hash say."""
    processed, failed, unsuccessful, pending = await redis.pipeline(
        [
            ("HGETALL", f"{key}:processed"),
            ("HGETALL", f"{key}:failed"),
            ("ZRANGE", f"{key}:unsuccessful", 0, -1),
            ("SMEMBERS", f"{key}:dependencies"),
        ]
    )
    return Children(
        results={key: _json(raw) for key, raw in _pairs(processed)},
        failures={key: raw.decode(errors="replace") for key, raw in _pairs(failed)},
        fatal=[key.decode() for key in unsuccessful],
        pending=sorted(key.decode() for key in pending),
    )


def _pairs(flat: Any) -> list[tuple[str, bytes]]:
    return [(key.decode(), raw) for key, raw in zip(flat[::2], flat[1::2], strict=True)]


def _json(raw: bytes) -> Any:
    try:
        return from_json(raw)
    except msgspec.DecodeError:
        return raw.decode(errors="replace")
