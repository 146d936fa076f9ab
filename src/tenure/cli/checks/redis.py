"""A Redis server: can it be reached, is it new enough, and will it keep what it is given."""

from __future__ import annotations

import time
from typing import Any

from tenure.cli.checks.finding import Finding, judged
from tenure.core.errors import ServerError, StoreError
from tenure.store.redis import Redis

_OLDEST, _GOOD = (6, 2), (7, 0)
_SKEW_MS_NOTE, _SKEW_MS_PROBLEM = 1_000, 30_000


async def redis_findings(redis: Redis, name: str) -> list[Finding]:
    """What INFO, CONFIG and TIME say; a server that is away is one finding and ends it."""
    try:
        before_ms = time.time() * 1000
        clock = await redis.call("TIME")
        after_ms = time.time() * 1000
        info = _info(await redis.call("INFO"))
    except StoreError as error:
        remedy = "start it (`tenure up` brings one along) or name another: tenure doctor URL"
        return [Finding("problem", "reachable", f"{name}: {error}", remedy)]
    skew_ms = int(clock[0]) * 1000 + int(clock[1]) / 1000 - (before_ms + after_ms) / 2
    return [
        Finding("ok", "reachable", f"{name} in {after_ms - before_ms:.1f} ms"),
        version_finding(info),
        _role(info),
        _aof(info),
        *await _settings(redis),
        clock_finding(skew_ms),
    ]


def version_finding(info: dict[str, str]) -> Finding:
    """6.2 is needed (XAUTOCLAIM, XPENDING IDLE), 7 is better."""
    text = info.get("valkey_version") or info.get("redis_version", "0")
    # Valkey calls itself Redis 7.2 here, so that the comparison holds for both.
    number = tuple(int(part) for part in info.get("redis_version", "0.0").split(".")[:2])
    if number < _OLDEST:
        return Finding(
            "problem", "redis version", text, "upgrade to 6.2 or newer, better 7 or newer"
        )
    remedy = "upgrade to 7 or newer: it counts waiting entries itself"
    return judged("redis version", text, bad=number < _GOOD, level="note", remedy=remedy)


def _role(info: dict[str, str]) -> Finding:
    role = info.get("role", "?")
    remedy = "use the address of the primary; a replica takes no writes"
    return judged("role", role, bad=role != "master", remedy=remedy)


def _aof(info: dict[str, str]) -> Finding:
    if info.get("aof_enabled") != "1":
        remedy = (
            "jobs die with the server: redis-cli config set appendonly yes, then config rewrite"
        )
        return Finding("problem", "append-only file", "off", remedy)
    status = info.get("aof_last_write_status", "ok")
    remedy = "the last write failed: look at the disk and the server's log"
    return judged("append-only file", f"on, last write {status}", bad=status != "ok", remedy=remedy)


async def _settings(redis: Redis) -> list[Finding]:
    values: dict[str, str] = {}
    for name in ("appendfsync", "maxmemory-policy", "maxmemory"):
        try:
            pair = await redis.call("CONFIG", "GET", name)
        except ServerError as error:
            remedy = "ask whoever runs the server for appendfsync and maxmemory-policy"
            return [Finding("note", "server settings", f"not readable: {error}", remedy)]
        values[name] = pair[1].decode() if pair else "?"
    return [_fsync(values["appendfsync"]), _memory(values["maxmemory-policy"], values["maxmemory"])]


def _fsync(mode: str) -> Finding:
    if mode == "everysec":
        detail = "everysec: a power cut may lose the last second, a crash of Redis nothing"
        return Finding("ok", "appendfsync", detail)
    remedy = "redis-cli config set appendfsync everysec (or always), then config rewrite"
    return judged("appendfsync", mode, bad=mode != "always", remedy=remedy)


def _memory(policy: str, limit: str) -> Finding:
    detail = f"{policy}, maxmemory {limit or '0'}"
    remedy = "redis-cli config set maxmemory-policy noeviction, or jobs vanish when memory is full"
    level: Any = "problem" if limit not in ("", "0") else "note"
    return judged("eviction", detail, bad=policy != "noeviction", level=level, remedy=remedy)


def clock_finding(skew_ms: float) -> Finding:
    """`skew_ms` is positive when the store is ahead."""
    level: Any = "problem" if abs(skew_ms) > _SKEW_MS_PROBLEM else "note"
    return judged(
        "clock",
        f"the store is {abs(skew_ms):.0f} ms {'ahead of' if skew_ms > 0 else 'behind'} us",
        bad=abs(skew_ms) > _SKEW_MS_NOTE,
        level=level,
        remedy="leases go by the store's clock, but ages shown here do not: set up NTP",
    )


def _info(raw: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in raw.decode(errors="replace").splitlines())
    return {name: value for name, separator, value in lines if separator}
