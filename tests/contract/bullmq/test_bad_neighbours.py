"""What another program wrote beside a job (its parent, its scheduler, the keys of the queue) keeps
no job from its end, and no claim from its leases."""

import asyncio
import json
from typing import Any

import pytest

from tenure.contracts.bullmq.claim import BullmqClaimer
from tenure.core.errors import InvalidJob
from tenure.core.job import NewJob
from tenure.core.outcome import COMPLETED, Failure, Outcome, OutcomeKind
from tests.contract.bullmq.conftest import Bench
from tests.contract.bullmq.test_bad_records import healthy, overwrite, quarantine, run

pytestmark = pytest.mark.clause("B-55")
FAILURE = Failure(code="E", message="m", retryable=True)
LAST_ID = "18446744073709551615-18446744073709551615"  # nothing can be added behind it


async def child_of(bench: Bench, parent: str, told: Any = None, **fields: str) -> str:
    """A job whose hash names a parent that waits for it, as hostile as `told` and `fields` are."""
    (child,) = await healthy(bench, 1)
    base = bench.key("")[:-1]
    told = {"id": parent, "queueKey": base} if told is None else told
    hash_of_parent: Any = {"name": "work", "data": "1", "opts": "{}", "timestamp": "1", **fields}
    bench.raw.hset(bench.key(parent), mapping=hash_of_parent)
    bench.raw.zadd(bench.key("waiting-children"), {parent: 1})
    bench.raw.sadd(bench.key(f"{parent}:dependencies"), bench.key(child))
    link: Any = {"parentKey": bench.key(parent), "parent": json.dumps(told)}
    bench.raw.hset(bench.key(child), mapping=link)
    return child


async def test_an_immediate_retry_beside_an_overwritten_delayed_set_loses_no_job(
    bench: Bench,
) -> None:
    jobs = [NewJob(task="work", payload=b"1", job_id=f"j{n}", max_attempts=3) for n in range(3)]
    queue = bench.queue()
    await queue.submit(jobs)
    leases = await queue.claim(3, wait_ms=0)
    overwrite(bench, "delayed", "string")
    kinds: tuple[Any, ...] = ("bury", "fail", "bury")
    ends = [
        Outcome(lease, kind, failure=FAILURE) for lease, kind in zip(leases, kinds, strict=True)
    ]
    await queue.settle(ends)
    assert (bench.ids("wait"), sorted(bench.ids("failed"))) == (["j1"], ["j0", "j2"])


@pytest.mark.parametrize(
    "told",
    [
        {"id": "p", "queueKey": None},
        {"id": "p", "queueKey": {}},
        {"id": "p", "queueKey": [1]},
        {"id": None, "queueKey": "bull:x"},
        {"id": {}, "queueKey": "bull:x"},
        [1],
        7,
    ],
    ids=repr,
)
async def test_a_child_whose_parent_is_named_wrongly_ends_with_its_batch(
    bench: Bench, told: Any
) -> None:
    child = await child_of(bench, "p", told)
    ids = await healthy(bench, 3)
    await run(bench, [child, *ids])


@pytest.mark.parametrize("kind", ["complete", "bury"])
async def test_a_child_ends_no_wait_of_a_job_that_is_not_its_parent(
    bench: Bench, kind: Any
) -> None:
    """The child is in the dependencies of its own parent, and its link names a job elsewhere."""
    elsewhere = f"{bench.key('')[:-1]}-other"
    told = {"id": "p", "queueKey": elsewhere, "fpof": True}
    child = await child_of(bench, "q", told)
    fields: Any = {"name": "work", "data": "1", "opts": "{}", "timestamp": "1"}
    bench.raw.hset(f"{elsewhere}:p", mapping=fields)
    bench.raw.zadd(f"{elsewhere}:waiting-children", {"p": 1})
    queue = bench.queue()
    (lease,) = await queue.claim(1, wait_ms=0)
    await queue.settle([Outcome(lease, kind, result=b"1", failure=FAILURE)])
    assert bench.ids("completed" if kind == "complete" else "failed") == [child]
    assert bench.raw.zscore(f"{elsewhere}:waiting-children", "p") == 1
    assert bench.raw.hget(f"{elsewhere}:p", "defa") is None
    reason = f"as a parent: the link of its child names {elsewhere}:p"
    assert quarantine(bench) == {bench.key("q"): reason}


async def test_a_removed_parent_takes_no_job_with_it_that_is_not_its_child(bench: Bench) -> None:
    child = await child_of(bench, "p")
    (other,) = await healthy(bench, 1)
    strange = f"{bench.key('')[:-1]}-other:1"
    bench.raw.hset(strange, mapping={"name": "work", "data": "1"})
    bench.raw.sadd(bench.key("p:dependencies"), bench.key(other), strange)
    assert await bench.ledger().remove(["p"]) == ["ok"]
    assert not bench.raw.exists(bench.key("p"), bench.key(child))
    assert bench.raw.exists(bench.key(other), strange) == 2
    assert bench.ids("wait") == [other]


async def test_a_prioritized_parent_is_released_where_its_counter_is_no_number(
    bench: Bench,
) -> None:
    child = await child_of(bench, "p", priority="5")
    bench.raw.set(bench.key("pc"), "abc")
    queue = bench.queue()
    (lease,) = await queue.claim(1, wait_ms=0)
    assert await queue.settle([Outcome(lease, "complete", result=b"1")]) == [COMPLETED]
    assert (bench.ids("completed"), bench.ids("prioritized")) == ([child], ["p"])


@pytest.mark.parametrize("name", ["failed", "pc", "events", "tenure:journal", "meta", "marker"])
@pytest.mark.parametrize("kind", ["string", "stream", "hash"])
async def test_a_failed_child_ends_where_the_keys_of_its_parents_queue_were_overwritten(
    bench: Bench, name: str, kind: str
) -> None:
    elsewhere = f"{bench.key('')[:-1]}-other"
    told = {"id": "p", "queueKey": elsewhere, "fpof": True}
    child = await child_of(bench, "q", told)
    bench.raw.hset(bench.key(child), "parentKey", f"{elsewhere}:p")
    fields: Any = {"name": "work", "data": "1", "opts": "{}", "timestamp": "1", "tn": "1 x 0 0 - 0"}
    bench.raw.hset(f"{elsewhere}:p", mapping=fields)
    bench.raw.zadd(f"{elsewhere}:waiting-children", {"p": 1})
    bench.raw.sadd(f"{elsewhere}:p:dependencies", bench.key(child))
    if kind == "stream":
        bench.raw.xadd(f"{elsewhere}:{name}", {"a": "b"}, id=LAST_ID)
    elif kind == "hash":
        bench.raw.hset(f"{elsewhere}:{name}", "a", "b")
    else:
        bench.raw.set(f"{elsewhere}:{name}", "x")
    ids = await healthy(bench, 2)
    queue = bench.queue()
    leases = await queue.claim(5, wait_ms=0)
    await queue.settle([Outcome(lease, "bury", failure=FAILURE) for lease in leases])
    assert sorted(bench.ids("failed")) == sorted([child, *ids])
    assert bench.ids("active") == []


@pytest.mark.parametrize(
    "opts", ['{"delay":NaN}', '{"delay":Infinity}', '{"priority":NaN,"attempts":NaN}']
)
async def test_a_deduplicated_follower_with_numbers_that_are_none_is_stored(
    bench: Bench, opts: str
) -> None:
    (job,) = await healthy(bench, 1)
    bench.raw.hset(bench.key(job), "deid", "d")
    bench.raw.hset(bench.key("dn:d"), mapping={"name": "next", "data": "1", "opts": opts})
    queue = bench.queue()
    (lease,) = await queue.claim(1, wait_ms=0)
    assert await queue.settle([Outcome(lease, "complete", result=b"1")]) == [COMPLETED]
    assert [each.task for each in await queue.claim(1, wait_ms=0)] == ["next"]


@pytest.mark.parametrize("count", ["NaN", "-1", "1e999"])
async def test_a_cancel_keeps_failed_jobs_where_their_bound_is_no_count(
    bench: Bench, count: str
) -> None:
    ids = await healthy(bench, 3)
    for each in ids:
        bench.raw.hset(bench.key(each), "opts", f'{{"removeOnFail":{{"count":{count}}}}}')
    assert await bench.ledger().cancel(ids) == ["ok"] * 3
    assert sorted(bench.ids("failed")) == sorted(ids)


@pytest.mark.parametrize("limit", ["-1", "NaN", "0"])
async def test_a_parent_that_may_not_complete_fails_whatever_its_stacks_hold(
    bench: Bench, limit: str
) -> None:
    (job,) = await healthy(bench, 1)
    opts = f'{{"stackTraceLimit":{limit}}}'
    bench.raw.hset(bench.key(job), mapping={"stacktrace": "[NaN]", "opts": opts, "atm": "1"})
    bench.raw.zadd(bench.key(f"{job}:unsuccessful"), {"child": 1})
    queue = bench.queue()
    (lease,) = await queue.claim(1, wait_ms=0)
    await asyncio.wait_for(queue.settle([Outcome(lease, "complete", result=b"1")]), 10)
    assert bench.ids("failed") == [job]


@pytest.mark.clause("B-20")
@pytest.mark.parametrize("kind", ["fail", "complete"])
async def test_the_newest_hundred_stacks_are_kept_of_a_job_without_a_limit(
    bench: Bench, kind: OutcomeKind
) -> None:
    """A failure is added by the worker, a completion that a child forbids by the script."""
    (job,) = await healthy(bench, 1)
    earlier = [f"stack {number}" for number in range(20_000)]
    bench.raw.hset(bench.key(job), mapping={"stacktrace": json.dumps(earlier), "atm": "1"})
    if kind == "complete":
        bench.raw.zadd(bench.key(f"{job}:unsuccessful"), {"child": 1})
    queue = bench.queue()
    (lease,) = await queue.claim(1, wait_ms=0)
    await queue.settle([Outcome(lease, kind, result=b"1", failure=FAILURE)])
    kept = json.loads(bench.hash(job)["stacktrace"])
    assert kept[:-1] == earlier[-99:]


@pytest.mark.parametrize("start", [1e20, -1e20, 1e300, {}, "never"], ids=repr)
async def test_a_next_run_that_cannot_be_computed_stops_no_claim(bench: Bench, start: Any) -> None:
    await bench.producer().upsert_scheduler("s", pattern="0 0 1 1 *", name="tick")
    (job,) = bench.ids("delayed")
    opts = json.loads(bench.hash(job)["opts"])
    opts["repeat"]["startDate"] = start
    bench.raw.hset(bench.key(job), "opts", json.dumps(opts))
    bench.raw.zadd(bench.key("delayed"), {job: 1})
    ids = await healthy(bench, 2)
    queue = bench.queue()
    taken = {lease.job_id for lease in await queue.claim(5, wait_ms=0)}
    assert taken == {job, *ids}
    (later,) = await healthy(bench, 1)
    assert [lease.job_id for lease in await queue.claim(5, wait_ms=0)] == [later]


async def test_a_holder_settles_its_lease_where_the_active_list_was_overwritten(
    bench: Bench,
) -> None:
    ids = await healthy(bench, 4)
    queue = bench.queue()
    leases = await queue.claim(4, wait_ms=0)
    overwrite(bench, "active", "string")
    ends = [Outcome(lease, "complete", result=b"1") for lease in leases[:2]]
    ends += [Outcome(leases[2], "bury", failure=FAILURE), Outcome(leases[3], "release")]
    await queue.settle(ends)
    assert sorted(bench.ids("completed")) == ids[:2]
    assert (bench.ids("failed"), bench.ids("wait")) == ([ids[2]], [ids[3]])
    again = await queue.settle([Outcome(leases[3], "release")])
    assert bench.ids("wait") == [ids[3]], "an outcome sent again moves nothing"
    assert again[0] == (await queue.settle([Outcome(leases[3], "release")]))[0]


@pytest.mark.parametrize("name", ["wait", "prioritized", "delayed", "active", "waiting-children"])
@pytest.mark.parametrize("is_submitted", [True, False])
async def test_jobs_that_stood_in_an_overwritten_line_are_put_back(
    bench: Bench, name: str, is_submitted: bool
) -> None:
    producer = bench.producer()
    done, held, lost = await healthy(bench, 3)
    queue = bench.queue("w", lease_ms=1_000, stalled_ms=200)
    leases = await queue.claim(3, wait_ms=0)
    await queue.settle([Outcome(leases[0], "complete", result=b"1")])
    ids = await healthy(bench, 3)
    ids += [await producer.add("work", {}, priority=2), await producer.add("work", {}, delay=50)]
    later = await producer.add("work", {}, delay=60_000)
    child = await child_of(bench, "p", tn="1 waiting-children 0 0 - 0")
    bench.raw.hdel(bench.key(ids[0]), "tn")  # as Node stores it
    bench.raw.delete(bench.key(f"{lost}:lock"))
    overwrite(bench, name, "string")
    if is_submitted:  # the add meets the key first
        ids += await healthy(bench, 1)
        ids.append(await producer.add("work", {}, priority=2))
    await queue.upkeep()
    if name == "waiting-children":
        assert bench.ids(name) == ["p"]
    if name == "delayed":
        assert later in bench.ids(name)
    await queue.settle([Outcome(leases[1], "complete", result=b"1")])
    await run(bench, [done, held, lost, *ids, child, "p"])
    assert bench.ids("delayed") == [later]
    for each in ("wait", "active", "prioritized", "failed"):
        assert bench.ids(each) == []
    assert not bench.raw.exists(bench.key("tenure:restore"))


async def test_a_rate_limit_without_an_end_does_not_stop_the_queue(bench: Bench) -> None:
    (job,) = await healthy(bench, 1)
    bench.raw.set(bench.key("limiter"), "999")
    queue = bench.queue(limit_max=10, limit_ms=1_000)
    assert [lease.job_id for lease in await queue.claim(1, wait_ms=0)] == [job]
    assert 0 < bench.raw.pttl(bench.key("limiter")) <= 1_000


@pytest.mark.parametrize("field", ["atm", "stc", "priority", "timestamp"])
@pytest.mark.parametrize("value", ["abc", "1.5", "\t", "9" * 400])
async def test_a_claim_after_a_lost_answer_hands_out_jobs_whose_fields_are_no_numbers(
    bench: Bench, field: str, value: str
) -> None:
    ids = await healthy(bench, 3)
    queue = bench.queue()
    claimer: BullmqClaimer = queue._claimer
    await claimer._run_claim(3)
    claimer._reply_lost = True
    bench.raw.hset(bench.key(ids[1]), field, value)
    leases = await queue.claim(5, wait_ms=0)
    assert sorted(lease.job_id for lease in leases) == ids
    assert all(lease.attempt == 1 for lease in leases)


@pytest.mark.parametrize("name", ["completed", "wait"])
async def test_a_key_that_was_put_aside_is_kept_for_a_week(bench: Bench, name: str) -> None:
    await healthy(bench, 2)
    queue = bench.queue()
    first, second = await queue.claim(2, wait_ms=0)
    overwrite(bench, name, "string")
    await queue.settle([Outcome(first, "complete", result=b"1"), Outcome(second, "release")])
    assert 0 < bench.raw.pttl(bench.key(f"tenure:quarantine:{name}")) <= 604_800_000


async def test_obliterate_removes_what_was_set_aside(bench: Bench) -> None:
    ids = await healthy(bench, 2)
    overwrite(bench, "failed", "string")
    overwrite(bench, "bad", "list")
    bench.raw.rpush(bench.key("wait"), "bad")
    await run(bench, ids)
    assert quarantine(bench)
    await bench.ledger().obliterate()
    assert bench.raw.keys(bench.key("tenure:quarantine*")) == []


@pytest.mark.parametrize("value", ["abc", "9" * 400])
async def test_a_scheduler_whose_count_is_no_number_goes_on(bench: Bench, value: str) -> None:
    first = await bench.producer().upsert_scheduler("s", every=60_000, name="tick")
    bench.raw.hset(bench.key("repeat:s"), "ic", value)
    (lease,) = await bench.queue().claim(1, wait_ms=0)
    assert lease.job_id == first
    assert len(bench.ids("delayed")) == 1
    overwrite(bench, "repeat:s", "list")
    await bench.producer().upsert_scheduler("s", every=30_000, name="tick")
    assert bench.hash("repeat:s")["ic"] == "1"


@pytest.mark.parametrize("name", ["unsuccessful", "failed", "processed", "dependencies"])
async def test_a_retry_beside_a_parent_with_an_overwritten_key_sends_the_job_back(
    bench: Bench, name: str
) -> None:
    child = await child_of(bench, "p")
    bench.raw.lrem(bench.key("wait"), 0, child)
    bench.raw.zadd(bench.key("failed"), {child: 1})
    bench.raw.hset(bench.key("p:processed"), bench.key(child), "1")
    overwrite(bench, f"p:{name}", "string")
    assert await bench.ledger().retry([child]) == ["ok"]
    assert (bench.ids("failed"), bench.ids("wait")) == ([], [child])


async def test_a_job_is_removed_beside_children_whose_names_are_none(bench: Bench) -> None:
    (job,) = await healthy(bench, 1)
    bench.raw.sadd(bench.key(f"{job}:dependencies"), "nocolon", "", bench.key(job))
    assert await bench.ledger().remove([job]) == ["ok"]
    assert bench.ids("wait") == []


@pytest.mark.parametrize("kind", ["string", "hash"])
async def test_listings_pass_over_what_cannot_be_read(bench: Bench, kind: str) -> None:
    ids = await healthy(bench, 2)
    await bench.producer().upsert_scheduler("s", every=60_000, name="tick")
    bench.raw.rpush(bench.key("wait"), b"\xff")
    bench.raw.zadd(bench.key("repeat"), {b"\xff": 1, b"bad": 2})
    bench.raw.set(bench.key("repeat:bad"), "x")
    for name in ("completed", "prioritized", "metrics:completed:data"):
        overwrite(bench, name, kind)
    overwrite(bench, "metrics:completed", "list")
    ledger = bench.ledger()
    states = ("waiting", "completed", "prioritized")
    found = {record.job_id for record in await ledger.jobs(*states)}
    assert found >= set(ids)
    assert {record.job_id for record in await ledger.jobs(*states, ascending=True)} == found
    assert [each.scheduler_id for each in await ledger.schedulers()] == ["s"]
    metrics = await ledger.metrics()
    assert (metrics.count, metrics.points, metrics.length) == (0, [], 0)
    overwrite(bench, "repeat", kind)
    assert await ledger.schedulers() == []


@pytest.mark.parametrize(
    "options",
    [
        {"sizeLimit": "abc"},
        {"sizeLimit": []},
        {"backoff": {"type": "fixed", "delay": 1, "jitter": "abc"}},
        {"backoff": {"type": "fixed", "delay": 1, "jitter": float("nan")}},
        {"delay": float("nan")},
        {"delay": float("inf")},
        {"attempts": "abc"},
        {"timestamp": "abc", "delay": 5},
        {"attempts": float("inf")},
        {"deduplication": {"id": "d", "ttl": "abc"}},
    ],
    ids=repr,
)
async def test_a_submission_with_an_option_that_is_no_number_is_invalid(
    bench: Bench, options: dict[str, Any]
) -> None:
    job = NewJob(task="work", payload=b"1", options=options)
    (answer,) = await bench.queue().submit([job])
    assert answer.status == "invalid"
    with pytest.raises(InvalidJob):
        await bench.producer().add("work", {}, **options)
