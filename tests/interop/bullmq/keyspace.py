"""What a queue is in Redis, in a form in which two of them can be compared.

Times, tokens and stacks differ from run to run; what stands beside BullMQ's data (our journal, the
field `tn`, additional event fields) is ours alone. Everything else must be equal.
"""

from __future__ import annotations

import json
from typing import Any

import redis

OURS = {"tn", "workerId", "pb"}
TIMES = {"timestamp", "processedOn", "finishedOn", "prevTS"}
EXTRA_EVENT_FIELDS = {"timestamp", "workerId", "progress", "step", "info"}
# `retry` is the contract's own word; `debounced` is what 5.x calls `deduplicated` a second time.
# A step of Node that fetches no next job says `drained` more often than its worker does; workers
# are compared in test_as_node_does.py.
UNCOMPARED = ("retry", "debounced", "drained")
SKIPPED = ("tenure:", "stalled-check")


def keyspace(client: redis.Redis, prefix: str, queue: str) -> dict[str, Any]:
    """Every key of one queue, normalised."""
    start = f"{prefix}:{queue}:"
    found: dict[str, Any] = {}
    for key in sorted(each.decode() for each in client.scan_iter(match=start + "*", count=1000)):
        short = key[len(start) :]
        if not short.startswith(SKIPPED):
            value = _value(client, key, short)
            found[short] = _scrub(value, prefix)
    marker = found.pop("marker", {})
    found["marker"] = _marker(marker, found)
    return found


def _value(client: redis.Redis, key: str, short: str) -> Any:
    kind = client.type(key).decode()
    match kind:
        case "hash":
            return _hash({a.decode(): b.decode() for a, b in client.hgetall(key).items()})
        case "list":
            return [each.decode() for each in client.lrange(key, 0, -1)]
        case "set":
            return sorted(each.decode() for each in client.smembers(key))
        case "zset":
            return _zset(short, client.zrange(key, 0, -1, withscores=True))
        case "stream":
            events = [{a.decode(): b.decode() for a, b in f.items()} for _, f in client.xrange(key)]
            return [_event(event) for event in events if event["event"] not in UNCOMPARED]
        case _:
            if short.endswith(":lock"):
                return "locked" if client.pttl(key) > 0 else "locked for ever"
            return [client.get(key).decode(), client.pttl(key) > 0]


def _hash(fields: dict[str, str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in fields.items():
        if name in OURS or name == "version":
            continue
        if name in TIMES:
            out[name] = "time"
        elif name == "delay":
            out[name] = value if value == "0" else "delay"
        elif name == "stacktrace":
            out[name] = len(json.loads(value))
        elif name in ("opts", "parent"):
            out[name] = _options(json.loads(value))
        else:
            out[name] = value
    return out


def _options(options: dict[str, Any]) -> dict[str, Any]:
    """Lua and JavaScript write an absent choice differently; to every reader it is the same."""
    kept = {name: value for name, value in options.items() if value not in (False, None)}
    kept.pop("timestamp", None)
    if kept.get("delay"):
        kept["delay"] = "delay"
    return kept


def _zset(short: str, members: list[tuple[bytes, float]]) -> Any:
    names = [member.decode() for member, _ in members]
    if short == "prioritized":
        return [(member.decode(), score) for member, score in members]
    if short in ("completed", "failed", "waiting-children") or short.endswith(":unsuccessful"):
        return sorted(names)
    if short == "marker":
        return {member.decode(): score for member, score in members}
    return names


def _event(event: dict[str, str]) -> dict[str, str]:
    kept = {name: value for name, value in event.items() if name not in EXTRA_EVENT_FIELDS}
    if "delay" in kept:
        kept["delay"] = "delay"
    return kept


def _marker(marker: dict[str, float], found: dict[str, Any]) -> list[str]:
    """A ring for nothing wakes a worker for nothing; what counts is the ring when there is work."""
    paused = "paused" in found.get("meta", {})
    rings = []
    if not paused and (found.get("wait") or found.get("prioritized")) and "0" in marker:
        rings.append("work")
    return rings


def _scrub(value: Any, prefix: str) -> Any:
    """Keys inside values (parents, children) name the prefix they live under."""
    text = json.dumps(value)
    return json.loads(text.replace(f"{prefix}:", "PREFIX:"))
