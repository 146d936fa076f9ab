"""Whether `stats` and `idx` say what stands in the lanes, and the lanes what the jobs say."""

from __future__ import annotations

import redis

STATES = ("wait", "active", "delayed", "failed", "completed")


def lanes(raw: redis.Redis, queue: str) -> dict[str, list[str]]:
    """The ids in every lane, with groups under `gwait`."""
    base = f"{{{queue}}}"
    grouped = [
        each.decode()
        for key in sorted(raw.scan_iter(f"{base}:g:*:wait", count=1000))
        for each in raw.lrange(key, 0, -1)
    ]
    return {
        "wait": _list(raw, f"{base}:wait"),
        "gwait": grouped,
        "active": _zset(raw, f"{base}:active"),
        "delayed": _zset(raw, f"{base}:delayed"),
        "failed": _list(raw, f"{base}:failed"),
        "completed": _list(raw, f"{base}:completed"),
    }


def untrue(raw: redis.Redis, queue: str) -> list[str]:
    """What the tables say and the lanes do not; [] when all agree."""
    stand = lanes(raw, queue)
    found = _of_states(raw, queue, stand) + _of_stats(raw, queue, stand)
    return found + _of_groups(raw, queue, stand)


def _of_states(raw: redis.Redis, queue: str, stand: dict[str, list[str]]) -> list[str]:
    base, found = f"{{{queue}}}", []
    for state in STATES:
        ids = stand[state] + (stand["gwait"] if state == "wait" else [])
        mirrored = _zset(raw, f"{base}:idx:{state}")
        if sorted(ids) != sorted(mirrored):
            found.append(f"{state}: {sorted(ids)[:9]} in the lane, {sorted(mirrored)[:9]} in idx")
        pipeline = raw.pipeline(transaction=False)
        for job_id in ids:
            pipeline.hget(f"{base}:job:{job_id}", "state")
        for job_id, says in zip(ids, pipeline.execute(), strict=True):
            if (says or b"none").decode() != state:
                found.append(f"{job_id} stands in {state} and says {says}")
    return found


def _of_stats(raw: redis.Redis, queue: str, stand: dict[str, list[str]]) -> list[str]:
    base = f"{{{queue}}}"
    told = {name.decode(): int(n) for name, n in raw.hgetall(f"{base}:stats").items()}
    counted = {
        "waiting": len(stand["wait"]),
        "group_waiting": len(stand["gwait"]),
        "waiting_total": len(stand["wait"]) + len(stand["gwait"]),
        "active": len(stand["active"]),
        "delayed": len(stand["delayed"]),
        "failed": len(stand["failed"]),
        "completed_kept": len(stand["completed"]),
        "groups_ready": raw.zcard(f"{base}:groups:ready"),
    }
    return [
        f"stats say {told.get(name, 0)} {name}, there are {n}"
        for name, n in counted.items()
        if told.get(name, 0) != n
    ]


def _of_groups(raw: redis.Redis, queue: str, stand: dict[str, list[str]]) -> list[str]:
    """A group's count is the number of its leases, and it is ready when it can give a job."""
    base = f"{{{queue}}}"
    running: dict[str, int] = {}
    for job_id in stand["active"]:
        gid = (raw.hget(f"{base}:job:{job_id}", "gid") or b"").decode()
        running[gid] = running.get(gid, 0) + 1
    counts = {
        key.decode()[len(base) + 3 : -len(":inflight")]: max(0, int(raw.get(key) or 0))
        for key in raw.scan_iter(f"{base}:g:*:inflight", count=1000)
    }
    found = []
    waiting = {
        key.decode()[len(base) + 3 : -len(":wait")]
        for key in raw.scan_iter(f"{base}:g:*:wait", count=1000)
    }
    ready = set(_zset(raw, f"{base}:groups:ready"))
    for gid in {*running, *counts, *waiting} - {""}:
        count, limit = counts.get(gid, 0), int(raw.get(f"{base}:g:{gid}:limit") or 1)
        if count != running.get(gid, 0):
            found.append(f"group {gid} counts {count} leases, there are {running.get(gid, 0)}")
        if gid in waiting and count < limit and gid not in ready:
            found.append(f"group {gid} has work and a slot and is not ready")
    return found


def _list(raw: redis.Redis, key: str) -> list[str]:
    return [each.decode() for each in raw.lrange(key, 0, -1)]


def _zset(raw: redis.Redis, key: str) -> list[str]:
    return [each.decode() for each in raw.zrange(key, 0, -1)]
