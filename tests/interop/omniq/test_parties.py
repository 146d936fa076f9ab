"""Any mix of clients on one queue: who publishes, who works and who steers is all the same."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis

from tenure.core.outcome import Failure, Outcome
from tenure.core.registry import open_ledger, open_queue
from tests.contract.omniq.tables import lanes, untrue
from tests.interop.omniq.peer import VERSIONS, Official, Ours, Party, PeerError

OFFICIAL, OURS = "official", "ours"
REFUSALS = ("TOKEN_MISMATCH", "NOT_ACTIVE", "NO_JOB", "NOT_FAILED", "ACTIVE", "LANE_MISMATCH")
ROLES = list(itertools.product((OURS, OFFICIAL), repeat=3))


def now_ms() -> int:
    return time.time_ns() // 1_000_000


async def until_it_says_right(raw: redis.Redis, server: str, name: str, version: str) -> None:
    """4.0.0 and ours keep the tables at every step; what 1.x leaves wrong, upkeep puts right."""
    if version == "1.7.0":
        queue = open_queue(f"omniq+{server}?queue={name}")
        raw.hdel(f"{{{name}}}:upkeep", "tidy_at")
        await queue.upkeep()
        await queue.close()
    assert untrue(raw, name) == []


@pytest.mark.clause("O-13", "O-38")
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("roles", ROLES, ids="-".join)
async def test_a_job_goes_through_any_hands(
    raw: redis.Redis,
    server: str,
    name: str,
    ours: Ours,
    official: Callable[..., Official],
    roles: tuple[str, str, str],
    version: str,
) -> None:
    parties: dict[str, Party] = {OURS: ours, OFFICIAL: official(version)}
    publisher, worker, admin = (parties[role] for role in roles)
    q = {"queue": name}

    async def reserve() -> Any:
        job = await worker.ask("reserve", **q)
        assert job, f"{worker.name} sees no job"
        return job

    await publisher.ask("publish", **q, payload={"a": "é"}, job_id="p", max_attempts=1)
    await publisher.ask("publish", **q, payload=[1], job_id="g", gid="team", group_limit=2)
    due_ms = now_ms() + 3_600_000
    await publisher.ask("publish", **q, payload={}, job_id="l", due_ms=due_ms)
    if version != "1.7.0":
        assert untrue(raw, name) == []

    assert await admin.ask("pause", **q) == "OK"
    assert await worker.ask("reserve", **q) == {"status": "PAUSED"}
    assert await admin.ask("is_paused", **q)
    assert await admin.ask("resume", **q) == 1

    first, second = await reserve(), await reserve()
    assert {first["job_id"], second["job_id"]} == {"p", "g"}
    plain, grouped = (first, second) if first["job_id"] == "p" else (second, first)
    assert (plain["payload"], grouped["payload"], grouped["gid"]) == ('{"a":"é"}', "[1]", "team")
    assert await worker.ask("reserve", **q) is None
    with pytest.raises(PeerError, match="TOKEN_MISMATCH"):
        await admin.ask("ack_success", **q, job_id="p", lease_token="forged")
    lease = {"job_id": "g", "lease_token": grouped["lease_token"]}
    assert await worker.ask("heartbeat", **q, **lease) >= grouped["lock_until_ms"]
    await worker.ask("ack_success", **q, **lease)
    lease = {"job_id": "p", "lease_token": plain["lease_token"]}
    assert await worker.ask("ack_fail", **q, **lease, error="boom") == ["FAILED", None]
    assert lanes(raw, name)["failed"] == ["p"]

    await admin.ask("retry_failed", **q, job_id="p")
    later = {"now_ms_override": due_ms + 1}
    assert await admin.ask("promote_delayed", **q, **later) == 1
    again = {(await reserve())["job_id"], (await reserve())["job_id"]}
    assert again == {"p", "l"}
    far = {"now_ms_override": due_ms + 10_000_000}
    assert await admin.ask("reap_expired", **q, **far) == 2
    await admin.ask("remove_job", **q, job_id="p", lane="failed")
    await admin.ask("remove_job", **q, job_id="l", lane="delayed")
    await admin.ask("remove_job", **q, job_id="g", lane="completed")
    assert not any(lanes(raw, name).values())
    await until_it_says_right(raw, server, name, version)


class Shuffle:
    """Random steps by random parties, with what they hold."""

    def __init__(self, parties: list[Party], name: str, seed: int) -> None:
        self.parties, self.name = parties, name
        self.random = random.Random(seed)
        self.held: list[tuple[str, str]] = []
        self.numbers = itertools.count()
        self.shift_ms = 0

    async def step(self) -> None:
        party = self.random.choice(self.parties)
        acts = ["publish"] * 5 + ["reserve"] * 6 + ["success"] * 4 + ["fail"] * 3 + ["beat"]
        acts += ["promote", "reap", "retry", "remove", "flag"]
        act = self.random.choice(acts)
        try:
            await getattr(self, act)(party)
        except PeerError as error:  # a refusal is an answer: the tables must be right all the same
            if not any(word in str(error) for word in REFUSALS):
                raise

    async def publish(self, party: Party) -> None:
        options: dict[str, Any] = {"job_id": f"j{next(self.numbers)}", "max_attempts": 2}
        if self.random.random() < 0.5:
            options |= {"gid": f"g{self.random.randrange(4)}"}
            options |= {"group_limit": self.random.randrange(3)}
        if self.random.random() < 0.2:
            options["due_ms"] = now_ms() + 60_000
        options |= {"timeout_ms": 60_000, "backoff_ms": 1}
        await party.ask("publish", queue=self.name, payload={"n": 1}, **options)

    async def reserve(self, party: Party) -> None:
        job = await party.ask("reserve", queue=self.name)
        if job and job["status"] == "JOB":
            self.held.append((job["job_id"], job["lease_token"]))

    async def _with_lease(self, party: Party, call: str, *, over: bool) -> None:
        if self.held:
            at = self.random.randrange(len(self.held))
            job_id, token = self.held.pop(at) if over else self.held[at]
            await party.ask(call, queue=self.name, job_id=job_id, lease_token=token)

    async def success(self, party: Party) -> None:
        await self._with_lease(party, "ack_success", over=True)

    async def fail(self, party: Party) -> None:
        await self._with_lease(party, "ack_fail", over=True)

    async def beat(self, party: Party) -> None:
        await self._with_lease(party, "heartbeat", over=False)

    async def promote(self, party: Party) -> None:
        await party.ask("promote_delayed", queue=self.name)

    async def reap(self, party: Party) -> None:
        late = now_ms() + 400_000 if self.random.random() < 0.3 else 0
        await party.ask("reap_expired", queue=self.name, now_ms_override=late)

    async def retry(self, party: Party) -> None:
        await party.ask("retry_failed", queue=self.name, job_id=self._some_id())

    async def remove(self, party: Party) -> None:
        lane = self.random.choice(["wait", "gwait", "delayed", "failed", "completed"])
        await party.ask("remove_job", queue=self.name, job_id=self._some_id(), lane=lane)

    async def flag(self, party: Party) -> None:
        await party.ask("pause", queue=self.name)
        await self.random.choice(self.parties).ask("resume", queue=self.name)

    def _some_id(self) -> str:
        return f"j{self.random.randrange(max(1, next(self.numbers)))}"


@pytest.mark.clause("O-38", "O-34")
@pytest.mark.parametrize("seed", range(4))
async def test_after_random_steps_of_ours_and_4_the_tables_say_what_is_there(
    raw: redis.Redis, name: str, ours: Ours, official: Callable[..., Official], seed: int
) -> None:
    shuffle = Shuffle([ours, official("4.0.0")], name, seed)
    for number in range(250):
        await shuffle.step()
        if number % 10 == 0:
            assert untrue(raw, name) == [], f"after step {number} of seed {seed}"
    assert untrue(raw, name) == []


@pytest.mark.clause("O-51")
@pytest.mark.parametrize("seed", range(2))
async def test_after_random_steps_with_1_7_upkeep_puts_the_tables_right(
    raw: redis.Redis,
    server: str,
    name: str,
    ours: Ours,
    official: Callable[..., Official],
    seed: int,
) -> None:
    shuffle = Shuffle([ours, official("1.7.0")], name, seed)
    for _ in range(200):
        await shuffle.step()
    await until_it_says_right(raw, server, name, "1.7.0")


@pytest.mark.clause("O-43", "O-38")
@pytest.mark.parametrize("seed", range(2))
async def test_the_official_client_works_on_our_scripts(
    raw: redis.Redis, name: str, ours: Ours, official: Callable[..., Official], seed: int
) -> None:
    borrowed = official("4.0.0", on_our_scripts=True)
    shuffle = Shuffle([borrowed, ours, official("4.0.0")], name, 100 + seed)
    for number in range(250):
        await shuffle.step()
        if number % 10 == 0:
            assert untrue(raw, name) == [], f"after step {number} of seed {seed}"
    assert untrue(raw, name) == []


@pytest.mark.clause("O-20")
async def test_the_last_error_is_whoevers_it_was(
    server: str, name: str, ours: Ours, official: Callable[..., Official]
) -> None:
    """Our ledger shows our own error with its code, and another client's in its words."""
    url = f"omniq+{server}?queue={name}"
    queue, ledger = open_queue(url), open_ledger(url)
    try:
        await ours.ask("publish", queue=name, payload={}, job_id="j", backoff_ms=0)
        (lease,) = await queue.claim(1, wait_ms=0)
        failure = Failure(code="Mine", message="own words")
        await queue.settle([Outcome(lease, "retry", failure=failure)])
        found = await ledger.get("j")
        assert found is not None
        assert b'"Mine"' in found.error
        job = await official("4.0.0").ask("reserve", queue=name)
        token = {"job_id": "j", "lease_token": job["lease_token"]}
        await official("4.0.0").ask("ack_fail", queue=name, **token, error="their words")
        found = await ledger.get("j")
        assert found is not None
        assert found.error == b'{"code":"error","message":"their words"}'
    finally:
        await queue.close()
        await ledger.close()
