"""Checks of `tenure doctor` for a queue of this contract."""

from __future__ import annotations

from typing import Any

import msgspec

from tenure.contracts.streams.options import GROUP, Options, keys
from tenure.contracts.streams.shards import shard_options
from tenure.core.errors import ServerError
from tenure.core.registry import Finding, make_finding, paused_finding
from tenure.store.redis import Redis

_LATE_LEASES = 3  # a healthy worker takes over an expired lease within two lease lengths


async def queue_findings(redis: Redis, options: Options) -> list[Finding]:
    """The findings of a queue; of one with shards what is wrong in some, and what is right in all.

    What differs in good order, such as the depth, is not told shard by shard.
    """
    if options.shards == 1:
        return await findings(redis, options)
    good: dict[str, set[Finding]] = {}
    bad: dict[Finding, list[int]] = {}
    for shard, each in enumerate(shard_options(options)):
        for finding in await findings(redis, each):
            if finding.level == "ok":
                good.setdefault(finding.check, set()).add(finding)
            else:
                bad.setdefault(finding, []).append(shard)
    wrong = {finding.check for finding in bad}
    return [
        *(
            same.pop() if len(same) == 1 else Finding("ok", check, f"{len(same)} shards in order")
            for check, same in good.items()
            if check not in wrong
        ),
        *(
            msgspec.structs.replace(
                finding, detail=f"shard {', '.join(map(str, shards))}: {finding.detail}"
            )
            for finding, shards in bad.items()
        ),
    ]


async def findings(redis: Redis, options: Options) -> list[Finding]:
    """The stream and its consumer group: leases that ran out, workers that went away, depth."""
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
        return [
            make_finding(
                "consumer group",
                f"{length} jobs, no group" if length else "no worker has ever served this queue",
                bad=bool(length),
                level="note",
                remedy="start a worker: tenure worker app.py",
            )
        ]
    late_ms = _LATE_LEASES * options.lease_ms
    late = await redis.call("XPENDING", stream, GROUP, "IDLE", late_ms, "-", "+", 100)
    count = f"{len(late)}{'+' if len(late) == 100 else ''}"
    return [
        Finding("ok", "consumer group", GROUP),
        make_finding(
            "running jobs",
            f"{count} without a sign of life for {late_ms / 1000:g} s",
            bad=bool(late),
            remedy="no worker takes them over: start one (tenure worker app.py)",
        ),
        _consumers([_pairs(each) for each in consumers], late_ms),
        _depth(int(length) + int(waiting), options.max_depth),
        paused_finding(bool(is_paused), "tenure resume"),
    ]


def _consumers(consumers: list[dict[str, Any]], late_ms: int) -> Finding:
    dead = [c["name"].decode() for c in consumers if c["pending"] and c["idle"] > late_ms]
    alive = sum(c["idle"] <= late_ms for c in consumers)
    shown = ", ".join(dead[:3]) + (" ..." if len(dead) > 3 else "")
    return make_finding(
        "workers",
        f"{alive} alive" + (f", gone with work in hand: {shown}" if dead else ""),
        bad=bool(dead),
        level="note",
        remedy="another worker takes their jobs when the leases run out",
    )


def _depth(depth: int, limit: int) -> Finding:
    share = depth / limit if limit else 0.0
    return make_finding(
        "depth",
        f"{depth} jobs" + (f" of {limit} allowed" if limit else ""),
        bad=share >= 0.8,
        level="problem" if share >= 1 else "note",
        remedy="more workers, or a higher max_depth in the queue URL; a full queue refuses jobs",
    )


def _pairs(flat: list[Any]) -> dict[str, Any]:
    return {key.decode(): value for key, value in zip(flat[::2], flat[1::2], strict=True)}
