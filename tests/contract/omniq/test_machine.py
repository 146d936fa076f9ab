"""Random lives of a queue with groups, step by step against a model of a few lists.

The model knows no scripts, no mirror tables and no turns. After every step the lanes in the store
are the model's, the counters and mirror tables say so, and whatever was handed out stood at the
head of its lane in a group that had a free slot.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tenure.contracts.omniq import Client, Paused, Refused, Reserved, TokenMismatch
from tests.contract.adapters import Servers
from tests.contract.omniq.tables import lanes, untrue

_numbers = itertools.count(1)
GROUPS = st.sampled_from(["", "", "a", "b", "c"])
TIMEOUT_MS, BACKOFF_MS, ATTEMPTS = 1_000, 300, 2


@dataclass
class Job:
    gid: str
    attempt: int = 0
    token: str = ""
    until: int = 0
    due: int = 0


@dataclass
class Model:
    """What the contract says a queue is."""

    now: int = 1_000_000
    jobs: dict[str, Job] = field(default_factory=dict)
    lanes: dict[str, list[str]] = field(default_factory=dict)
    limits: dict[str, int] = field(default_factory=dict)
    active: set[str] = field(default_factory=set)
    delayed: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    completed: list[str] = field(default_factory=list)
    stale: list[tuple[str, str]] = field(default_factory=list)
    paused: bool = False

    def lane(self, gid: str) -> list[str]:
        return self.lanes.setdefault(gid, [])

    def running(self, gid: str) -> int:
        return sum(self.jobs[each].gid == gid for each in self.active)

    def can_give(self, gid: str) -> bool:
        free = not gid or self.running(gid) < self.limits.get(gid, 1)
        return bool(self.lanes.get(gid)) and free

    def over(self, job_id: str) -> Job:
        job = self.jobs[job_id]
        self.active.discard(job_id)
        self.stale.append((job_id, job.token))
        job.token = ""
        return job

    def again_or_failed(self, job_id: str) -> int:
        """The due time of the next attempt, or 0 when none is left."""
        job = self.over(job_id)
        if job.attempt >= ATTEMPTS:
            self.failed.insert(0, job_id)
            return 0
        job.due = self.now + BACKOFF_MS
        self.delayed.add(job_id)
        return job.due


class Machine(RuleBasedStateMachine):
    url = ""

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.queue = f"machine-{next(_numbers)}"
        self.raw = redis.Redis.from_url(self.url)
        self.client = Client(self.url)
        self.model = Model()
        self.ids = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.do(self.client.close())
            self.runner.close()
            self.raw.close()

    def do(self, call: Any) -> Any:
        return self.runner.run(call)

    # -- steps ------------------------------------------------------------------------------------

    @rule(gid=GROUPS, limit=st.integers(0, 3), later=st.booleans())
    def publish(self, gid: str, limit: int, later: bool) -> None:
        model, job_id = self.model, f"j{next(self.ids)}"
        due = model.now + 700 if later else 0
        self.do(self._publish(job_id, gid, limit, due))
        model.jobs[job_id] = Job(gid, due=due)
        if gid and limit:
            model.limits.setdefault(gid, limit)
        if later:
            model.delayed.add(job_id)
        else:
            model.lane(gid).append(job_id)

    def _publish(self, job_id: str, gid: str, limit: int, due: int) -> Any:
        return self.client.publish(
            self.queue,
            {"job": job_id},
            job_id=job_id,
            gid=gid,
            group_limit=limit,
            due_ms=due,
            max_attempts=ATTEMPTS,
            timeout_ms=TIMEOUT_MS,
            backoff_ms=BACKOFF_MS,
            now_ms_override=self.model.now,
        )

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data())
    def publish_again(self, data: st.DataObject) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.model.jobs)))
        assert self.do(self._publish(job_id, self.model.jobs[job_id].gid, 0, 0)) == job_id

    @rule(limit=st.integers(1, 5))
    def reserve(self, limit: int) -> None:
        model = self.model
        if limit == 1:
            got = self.do(self.client.reserve(self.queue, model.now))
            assert (got == Paused()) == model.paused
            jobs = [got] if isinstance(got, Reserved) else []
        else:
            jobs = self.do(self.client.reserve_many(self.queue, limit, now_ms_override=model.now))
        for job in jobs:
            assert not model.paused
            assert model.can_give(job.gid), f"{job.job_id} of group {job.gid!r} was not to be given"
            assert model.lane(job.gid)[0] == job.job_id, "not the head of its lane"
            model.lane(job.gid).pop(0)
            mine = model.jobs[job.job_id]
            mine.attempt, mine.token = mine.attempt + 1, job.lease_token
            mine.until = model.now + TIMEOUT_MS
            assert (job.attempt, job.lock_until_ms) == (mine.attempt, mine.until)
            model.active.add(job.job_id)
        if len(jobs) < limit and not model.paused:
            assert not any(map(model.can_give, model.lanes)), "there was more to give"

    @precondition(lambda self: self.model.active)
    @rule(data=st.data(), how=st.sampled_from(["success", "fail", "beat"]))
    def end(self, data: st.DataObject, how: str) -> None:
        model = self.model
        job_id = data.draw(st.sampled_from(sorted(model.active)))
        job = model.jobs[job_id]
        args = (self.queue, job_id, job.token, model.now)
        if how == "success":
            self.do(self.client.ack_success(*args))
            model.over(job_id)
            model.completed.insert(0, job_id)
        elif how == "fail":
            due = model.again_or_failed(job_id)
            expected = ("RETRY", due) if due else ("FAILED", None)
            assert self.do(self.client.ack_fail(*args)) == expected
        else:
            job.until = max(job.until, model.now + TIMEOUT_MS)
            assert self.do(self.client.heartbeat(*args)) == job.until

    @precondition(lambda self: self.model.stale)
    @rule(data=st.data())
    def beat_with_a_stale_token(self, data: st.DataObject) -> None:
        job_id, token = data.draw(st.sampled_from(self.model.stale))
        with pytest.raises(TokenMismatch):
            self.do(self.client.heartbeat(self.queue, job_id, token, self.model.now))

    @rule(ms=st.sampled_from([1, 350, 1_200]))
    def time_passes(self, ms: int) -> None:
        self.model.now += ms

    @rule(most=st.sampled_from([1, 1_000]))
    def promote(self, most: int) -> None:
        model = self.model
        due = sorted(
            (model.jobs[j].due, j) for j in model.delayed if model.jobs[j].due <= model.now
        )
        done = self.do(self.client.promote_delayed(self.queue, most, model.now))
        assert done == min(most, len(due))
        for _, job_id in due[:most]:
            model.delayed.discard(job_id)
            model.lane(model.jobs[job_id].gid).append(job_id)

    @rule(most=st.sampled_from([1, 1_000]))
    def reap(self, most: int) -> None:
        model = self.model
        out = sorted(
            (model.jobs[j].until, j) for j in model.active if model.jobs[j].until <= model.now
        )
        assert self.do(self.client.reap_expired(self.queue, most, model.now)) == min(most, len(out))
        for _, job_id in out[:most]:
            model.again_or_failed(job_id)

    @rule(pause=st.booleans())
    def flag(self, pause: bool) -> None:
        if pause:
            assert self.do(self.client.pause(self.queue)) == "OK"
        else:
            assert self.do(self.client.resume(self.queue)) == int(self.model.paused)
        self.model.paused = pause

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        model = self.model
        job_id = data.draw(st.sampled_from(sorted(model.jobs)))
        if job_id not in model.failed:
            with pytest.raises(Refused, match="NOT_FAILED"):
                self.do(self.client.retry_failed(self.queue, job_id))
            return
        self.do(self.client.retry_failed(self.queue, job_id, now_ms_override=model.now))
        model.failed.remove(job_id)
        model.jobs[job_id].attempt = 0
        model.lane(model.jobs[job_id].gid).append(job_id)

    @precondition(lambda self: self.model.jobs)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        model = self.model
        job_id = data.draw(st.sampled_from(sorted(model.jobs)))
        gid = model.jobs[job_id].gid
        if job_id in model.active:
            with pytest.raises(Refused, match="ACTIVE"):
                self.do(self.client.remove_job(self.queue, job_id, "wait"))
            return
        for lane, members in (
            ("gwait" if gid else "wait", model.lane(gid)),
            ("failed", model.failed),
            ("completed", model.completed),
            ("delayed", model.delayed),
        ):
            if job_id in members:
                self.do(self.client.remove_job(self.queue, job_id, lane))  # type: ignore[arg-type]
                members.remove(job_id)
        del model.jobs[job_id]
        model.stale = [(each, token) for each, token in model.stale if each != job_id]

    # -- what always holds ------------------------------------------------------------------------

    @invariant()
    def the_store_is_what_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        model, stand = self.model, lanes(self.raw, self.queue)
        assert stand["wait"] == model.lane("")
        grouped = [each for gid in sorted(model.lanes) if gid for each in model.lanes[gid]]
        assert stand["gwait"] == grouped
        assert set(stand["active"]) == model.active
        assert set(stand["delayed"]) == model.delayed
        assert stand["failed"] == model.failed
        assert stand["completed"] == model.completed
        assert untrue(self.raw, self.queue) == []


@pytest.mark.timeout(300)
@pytest.mark.clause("O-9", "O-10", "O-38", "O-34")
def test_a_queue_with_groups_lives_as_its_model_does(servers: Servers) -> None:
    Machine.url = servers.redis()
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
