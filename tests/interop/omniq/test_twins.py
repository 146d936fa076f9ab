"""The same steps at the same times, by the official client and by ours: the same data is left.

What is left out: our own keys and fields, tokens, and what DEVIATIONS.md says we do otherwise.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis

from tenure.contracts.omniq import JobContext
from tests.contract.omniq.tables import untrue
from tests.interop.omniq.peer import HERE, Official, Ours, Party, PeerError, interpreter
from tests.waiting import until

OURS_ALONE = ("journal", "wake", "workers", "claims", "counters", "upkeep", "recent", "events")
FIELDS_OF_OURS = {"tn", "error", "error_ms", "cancel", "result", "task"}
DEADLINE_S = 60.0


def keyspace(raw: redis.Redis, queue: str) -> dict[str, Any]:
    """Everything under a queue's base, as values that compare."""
    base = f"{{{queue}}}:"
    found: dict[str, Any] = {}
    for key in sorted(raw.scan_iter(f"{base}*", count=1000)):
        name = key.decode()[len(base) :]
        if name.split(":")[0] in OURS_ALONE:
            continue
        found[name] = _value(raw, key)
    return {name: value for name, value in found.items() if value}


def _value(raw: redis.Redis, key: bytes) -> Any:
    match raw.type(key):
        case b"hash":
            fields = {n.decode(): v.decode() for n, v in raw.hgetall(key).items()}
            if fields.get("lease_token"):
                fields["lease_token"] = "(a token)"
            return {n: v for n, v in fields.items() if v and n not in FIELDS_OF_OURS}
        case b"list":
            return [each.decode() for each in raw.lrange(key, 0, -1)]
        case b"zset":
            return {
                member.decode(): score for member, score in raw.zrange(key, 0, -1, withscores=True)
            }
        case b"set":
            return {each.decode() for each in raw.smembers(key)}
        case _:
            return (raw.get(key) or b"").decode()


class Life:
    """One party's turn at the same story; `now` is the time of each step."""

    def __init__(self, party: Party, queue: str) -> None:
        self.party, self.queue = party, queue
        self.held: dict[str, str] = {}

    async def publish(self, job_id: str, now: int, **options: Any) -> None:
        await self.party.ask(
            "publish",
            queue=self.queue,
            payload={"job": job_id, "ü": [1, None, True]},
            job_id=job_id,
            now_ms_override=now,
            **options,
        )

    async def reserve(self, now: int) -> str | None:
        job = await self.party.ask("reserve", queue=self.queue, now_ms_override=now)
        if not job:
            return None
        self.held[job["job_id"]] = job["lease_token"]
        return str(job["job_id"])

    async def end(self, call: str, job_id: str, now: int, **options: Any) -> Any:
        return await self.party.ask(
            call,
            queue=self.queue,
            job_id=job_id,
            lease_token=self.held[job_id],
            now_ms_override=now,
            **options,
        )

    async def tend(self, call: str, now: int) -> int:
        return int(await self.party.ask(call, queue=self.queue, now_ms_override=now))

    async def ask(self, call: str, **arguments: Any) -> Any:
        return await self.party.ask(call, queue=self.queue, **arguments)


async def _story(life: Life, look: Callable[[str], None]) -> None:
    await life.publish("a", 1_000)
    await life.publish("b", 1_001, gid="g", group_limit=2, max_attempts=2, backoff_ms=500)
    await life.publish("c", 1_002, gid="g", timeout_ms=700)
    await life.publish("d", 1_003, due_ms=9_000)
    await life.publish("e", 1_004, gid="h", due_ms=9_000)
    await life.publish("f", 1_005, max_attempts=1)
    look("published")
    order = [await life.reserve(2_000 + n) for n in range(5)]
    assert order == ["b", "a", "c", "f", None]
    look("reserved")
    assert await life.end("ack_fail", "b", 3_000, error="boom") == ["RETRY", 3_500]
    look("failed once")
    assert await life.end("ack_fail", "f", 3_001, error="the end") == ["FAILED", None]
    await life.end("ack_success", "a", 3_002)
    look("acked")
    assert await life.tend("reap_expired", 3_003) == 1
    look("reaped")
    assert await life.tend("promote_delayed", 9_000) == 4
    look("promoted")
    await life.ask("retry_failed", job_id="f", now_ms_override=9_001)
    look("sent back")
    assert [await life.reserve(9_100 + n) for n in range(3)]
    look("reserved again")
    await life.ask("pause")
    look("paused")
    await life.ask("resume")


@pytest.mark.clause("O-13", "O-38")
async def test_the_same_story_leaves_the_same_data(
    raw: redis.Redis, name: str, ours: Ours, official: Callable[..., Official]
) -> None:
    seen: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for party in (official("4.0.0"), ours):
        queue = f"{name}-{party.name.split()[0]}"
        looks: list[tuple[str, dict[str, Any]]] = []

        def look(moment: str, queue: str = queue, looks: Any = looks) -> None:
            looks.append((moment, keyspace(raw, queue)))

        await _story(Life(party, queue), look)
        seen[party.name] = looks
    for theirs, own in zip(seen["omniq 4.0.0"], seen["ours"], strict=True):
        assert _known(own[1]) == _known(theirs[1]), f"after {theirs[0]}"


@pytest.mark.clause("O-13", "O-29", "O-38")
async def test_many_jobs_at_once_leave_what_the_official_client_leaves_one_by_one(
    raw: redis.Redis, name: str, ours: Ours, official: Callable[..., Official]
) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"gid": "g", "group_limit": 2},
        {"gid": "h", "due_ms": 9_000},
        {"max_attempts": 1, "timeout_ms": 700, "backoff_ms": 5},
    ]
    jobs = [
        ({"text": "ü" * 20 * n, "n": [n, None]}, {**kind, "job_id": f"{row}-{n}"})
        for row, kind in enumerate(kinds)
        for n in range(6)
    ]
    peer = official("4.0.0")
    for payload, given in jobs:
        await peer.ask(
            "publish", queue=f"{name}-theirs", payload=payload, now_ms_override=1_000, **given
        )
    await ours.client.publish_many(f"{name}-ours", jobs, now_ms_override=1_000)
    assert keyspace(raw, f"{name}-ours") == keyspace(raw, f"{name}-theirs")


@pytest.mark.clause("O-7", "O-17", "O-18", "O-27")
@pytest.mark.parametrize("max_attempts", [0, -1])
async def test_few_attempts_second_acks_and_last_children_are_as_in_the_official_client(
    raw: redis.Redis,
    name: str,
    ours: Ours,
    official: Callable[..., Official],
    max_attempts: int,
) -> None:
    answers: dict[str, list[Any]] = {}
    left: dict[str, Any] = {}
    peers = (official("4.0.0"), official("4.0.0", on_our_scripts=True), ours)
    for party, queue in zip(peers, (f"{name}-{n}" for n in range(3)), strict=True):
        life, key = Life(party, queue), f"parent-{queue}"
        await life.publish("a", 1_000, max_attempts=max_attempts)
        assert await life.reserve(2_000) == "a"
        told = [await life.end("ack_fail", "a", 3_000)]
        for call in ("ack_fail", "ack_success", "heartbeat"):
            with pytest.raises(PeerError, match="TOKEN_MISMATCH"):
                await life.end(call, "a", 3_001)
        await party.ask("childs_init", key=key, expected=2)
        told += [await party.ask("child_ack", key=key, child_id=child) for child in "aabb"]
        assert list(raw.scan_iter(f"*{key}*", count=1000)) == []
        data = keyspace(raw, queue)
        data.pop("stats")  # ours also says that no group waits
        answers[party.name], left[party.name] = told, data
    first, *others = answers.values()
    assert all(other == first for other in others), answers
    first, *others = left.values()
    for other in others:
        assert other == first


def _known(data: dict[str, Any]) -> dict[str, Any]:
    """Without what we do otherwise: a group that is idle leaves no count behind."""
    return {
        key: value for key, value in data.items() if not key.endswith(":inflight") or value != "0"
    }


@pytest.mark.clause("O-49", "O-38")
async def test_the_official_monitor_and_ours_tell_the_same(
    raw: redis.Redis, name: str, ours: Ours, official: Callable[..., Official]
) -> None:
    peer = official("4.0.0")
    await _story(Life(ours, name), lambda moment: None)
    told = await peer.ask("monitor.stats", queue=name)
    own = await ours.client.monitor.stats(name)
    assert told == {field: getattr(own, field) for field in told}
    assert name in await peer.ask("monitor.scan_queues")
    for lane in ("wait", "active", "delayed", "failed", "completed"):
        page = await peer.ask("monitor.lane_page", queue=name, lane=lane)
        same = await ours.client.monitor.lane_page(name, lane)  # type: ignore[arg-type]
        assert [job["job_id"] for job in page] == [each.job.job_id for each in same]
        assert [job["idx_score_ms"] for job in page] == [each.entered_ms for each in same]
    overview = await peer.ask("monitor.overview", queue=name, samples_per_lane=2)
    seen = await ours.client.monitor.overview(name, samples_per_lane=2)
    for lane in ("active", "delayed", "failed", "completed"):
        assert [job["job_id"] for job in overview[lane]] == [
            each.job.job_id for each in getattr(seen, lane)
        ]
    assert [group["gid"] for group in overview["ready_groups"]] == [
        each.gid for each in seen.ready_groups
    ]
    assert name in await ours.client.monitor.scan_queues()
    (group,) = await peer.ask("monitor.group_status", queue=name, gids=["g"])
    (status,) = await ours.client.monitor.group_status(name, ["g"])
    assert group == {field: getattr(status, field) for field in group}


@pytest.mark.clause("O-42", "O-13")
@pytest.mark.parametrize("version", ["4.0.0", "1.7.0"])
async def test_the_official_consumer_and_ours_share_the_work_and_each_job_runs_once(
    raw: redis.Redis, server: str, port: int, name: str, ours: Ours, tmp_path: Path, version: str
) -> None:
    count = 300
    jobs = [({"n": n}, {"gid": f"g{n % 7}"} if n % 2 else {}) for n in range(count)]
    ids = await ours.client.publish_many(name, jobs)
    effects = tmp_path / "theirs"
    effects.touch()
    argv = [str(interpreter(version)), str(HERE / "driver.py"), "consume", str(port), name]
    rival = subprocess.Popen([*argv, str(effects)], stdout=subprocess.DEVNULL)
    mine: list[str] = []
    stop = asyncio.Event()

    async def handler(ctx: JobContext) -> None:
        mine.append(ctx.job_id)
        await asyncio.sleep(0.02)  # so that the rival gets its share

    try:
        await until(lambda: effects.read_text().count("\n") >= 5, within_s=DEADLINE_S)
        consuming = asyncio.create_task(
            ours.client.consume(name, handler, stop=stop, signals=False)
        )
        await until(
            lambda: len(mine) + effects.read_text().count("\n") >= count, within_s=DEADLINE_S
        )
        await until(lambda: not raw.zcard(f"{{{name}}}:active"), within_s=DEADLINE_S)
        stop.set()
        await consuming
    finally:
        rival.kill()
        rival.wait()
    theirs = effects.read_text().split()
    assert mine
    assert sorted([*mine, *theirs]) == sorted(ids)
    if version == "4.0.0":
        assert untrue(raw, name) == []
    else:
        await ours.client.repair(name)
        assert untrue(raw, name) == []


@pytest.mark.clause("O-43")
def test_the_scripts_are_written_by_a_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tenure.contracts.omniq", str(tmp_path / "lua")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = sorted(path.name for path in (tmp_path / "lua").iterdir())
    assert len(written) == 15
    assert "ack_fail.lua" in written
    text = (tmp_path / "lua" / "reserve.lua").read_text()
    assert "@include" not in text
    assert "ZPOPMIN" in text
