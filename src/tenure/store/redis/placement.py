"""Where queues are on a Redis Cluster, and whether one node has most of the work or of the keys."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from tenure.core.registry import Finding, make_finding
from tenure.store.redis.client import Redis

_OPS_MIN = 100  # with fewer commands a second the shares say nothing
_KEYS_MIN = 1_000
_KEYS = re.compile(r"keys=(\d+)")
_SPREAD = (
    "one queue is one slot: give a busy streams queue shards=, and queues of the other contracts "
    "different hash tags; or move slots to other nodes"
)


async def placement_findings(redis: Redis, queue: str, keys: Sequence[str]) -> list[Finding]:
    """The slot and node of each of these keys, one for each slot of the queue; hot nodes."""
    places = [await redis.place_of(key) for key in keys]
    texts = await redis.ask_primaries("INFO")
    infos = {
        node: dict(line.split(":", 1) for line in raw.decode().splitlines() if ":" in line)
        for node, raw in texts.items()
    }
    commands = {name: int(info["instantaneous_ops_per_sec"]) for name, info in infos.items()}
    stored = {name: _keys_in(info.get("db0", "")) for name, info in infos.items()}
    return [
        _placement(queue, places, len(infos)),
        share_finding("cluster load", "commands a second", commands, _OPS_MIN),
        share_finding("cluster keys", "keys", stored, _KEYS_MIN),
    ]


def _placement(queue: str, places: Sequence[tuple[int, str]], nodes: int) -> Finding:
    named = ", ".join(f"slot {slot} on {node}" for slot, node in places)
    most = max(Counter(node for _, node in places).values())
    fair = -(-len(places) // nodes)
    return make_finding(
        "placement",
        f"{queue}: {named}",
        bad=most > fair,
        level="note",
        remedy=f"a node has {most} of the {len(places)} shards: move slots until none has more "
        f"than {fair} (redis-cli --cluster reshard)",
    )


def share_finding(check: str, what: str, counts: Mapping[str, int], least: int) -> Finding:
    """Whether one node has most of something; a total below `least` is never bad.

    >>> share_finding("keys", "keys", {"a:1": 900, "b:1": 60, "c:1": 40}, 100).level
    'note'
    """
    total = sum(counts.values())
    shares = {name: count / max(1, total) for name, count in counts.items()}
    hottest = max(shares, key=lambda name: shares[name])
    limit = max(0.5, 1.5 / len(counts))
    told = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    return make_finding(
        check,
        f"{total:,} {what}: {told}",
        bad=len(counts) > 1 and total >= least and shares[hottest] > limit,
        level="note",
        remedy=f"{hottest} has most of them; {_SPREAD}",
    )


def _keys_in(database: str) -> int:
    found = _KEYS.search(database)
    return int(found[1]) if found else 0
