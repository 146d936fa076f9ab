"""A `streams` queue: its group, entries whose lease ran out, workers that went away."""

from __future__ import annotations

from typing import Any

from tenure.cli.checks.finding import Finding, judged
from tenure.contracts.streams.options import GROUP, Options, keys
from tenure.core.errors import ServerError
from tenure.store.redis import Redis

_LATE = 3  # leases; a healthy worker takes over what ran out within two


async def streams_findings(redis: Redis, options: Options) -> list[Finding]:
    """What the stream and its consumer group say."""
    stream, _, delayed, _, _, _, _, paused, _ = keys(options.namespace)
    groups, consumers, is_paused, waiting, length = await redis.pipeline(
        [
            ("XINFO", "GROUPS", stream),
            ("XINFO", "CONSUMERS", stream, GROUP),
            ("EXISTS", paused),
            ("ZCARD", delayed),
            ("XLEN", stream),
        ]
    )
    if isinstance(groups, ServerError) or not groups:
        detail = (
            "no worker has ever served this queue" if not length else f"{length} jobs, no group"
        )
        return [
            judged(
                "consumer group",
                detail,
                bad=bool(length),
                level="note",
                remedy="start a worker: tenure worker app.py",
            )
        ]
    late_ms = _LATE * options.lease_ms
    late = await redis.call("XPENDING", stream, GROUP, "IDLE", late_ms, "-", "+", 100)
    return [
        Finding("ok", "consumer group", GROUP),
        _late(late, late_ms),
        _dead([_pairs(each) for each in consumers], late_ms),
        _depth(int(length) + int(waiting), options.max_depth),
        _paused(bool(is_paused)),
    ]


def _late(entries: list[Any], late_ms: int) -> Finding:
    return judged(
        "running jobs",
        f"{len(entries)}{'+' if len(entries) == 100 else ''} without a sign of life for "
        f"{late_ms / 1000:g} s",
        bad=bool(entries),
        remedy="no worker takes them over: start one (tenure worker app.py)",
    )


def _dead(consumers: list[dict[str, Any]], late_ms: int) -> Finding:
    dead = [c["name"].decode() for c in consumers if c["pending"] and c["idle"] > late_ms]
    alive = sum(c["idle"] <= late_ms for c in consumers)
    shown = ", ".join(dead[:3]) + (" ..." if len(dead) > 3 else "")
    return judged(
        "workers",
        f"{alive} alive" + (f", gone with work in hand: {shown}" if dead else ""),
        bad=bool(dead),
        level="note",
        remedy="another worker takes their jobs when the leases run out",
    )


def _depth(depth: int, limit: int) -> Finding:
    share = depth / limit if limit else 0.0
    return judged(
        "depth",
        f"{depth} jobs" + (f" of {limit} allowed" if limit else ""),
        bad=share >= 0.8,
        level="problem" if share >= 1 else "note",
        remedy="more workers, or a higher max_depth in the queue URL; a full queue refuses jobs",
    )


def _paused(is_paused: bool) -> Finding:
    detail = "paused" if is_paused else "handing out jobs"
    return judged("pause", detail, bad=is_paused, level="note", remedy="tenure resume")


def _pairs(flat: list[Any]) -> dict[str, Any]:
    return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
