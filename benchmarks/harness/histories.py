"""Made histories of any size for the pipeline's figures: sound, and as a busy queue leaves them.

Jobs of three to five events (some fail and run again), the events of many jobs mixed, up to twenty
of them an entry in a stream; or the same straight into the files of a lake.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import hiredis
import msgspec
import numpy as np
import pyarrow as pa

from tenure.core.journal import JournalEvent
from tenure.pipeline.lake import Lake
from tenure.pipeline.schema import ARROW, OFFSET, rows_of, stream_position_number
from tenure.store.journal import lines_of
from tenure.store.redis import BulkRedis

JOBS_AT_ONCE, AGAIN = 20, 2
LEASE_MS = 15_000
BEGAN_MS = 1_794_700_000_000
JOURNAL = "streams-made"
_AT_ONCE = 1_000_000
_ENTRIES_AT_ONCE = 500


def entries(events: int, seed: int = 1) -> Iterator[tuple[bytes, ...]]:
    """Entries of the streams contract's journal: submits, claims, ends; one job in ten runs twice.

    Jobs come and go twenty at a time. What is the same for all of them is written once, as the
    scripts write it: a field `s`, then their ids; all else is a field `e` for each line.
    """
    rng, made, number = Random(seed), 0, 0
    while made < events:
        at, task = BEGAN_MS + made // 50, b"task%d" % (number // JOBS_AT_ONCE % 7)
        ids = [b"%016x-%09d" % (rng.getrandbits(64), number + n) for n in range(JOBS_AT_ONCE)]
        number += JOBS_AT_ONCE
        again, once = ids[:AGAIN], ids[AGAIN:]
        yield _each(ids, b"submit\t1\t%d\t%s\t\tqueued\t0\t0\t0\t0\t0\t\t3" % (at, task))
        yield _shared(ids, _claim(2, at + 5, task, attempt=1))
        yield _shared(once, _end(b"complete", 3, at + 9, task, attempt=1) + b"\tabcd")
        failed = b"\t\t\t503\t%d" % (at + 20)
        yield _each(again, _end(b"retry", 3, at + 9, task, attempt=1) + failed)
        yield _each(again, _claim(4, at + 25, task, attempt=2))
        yield _each(again, _end(b"complete", 5, at + 29, task, attempt=2) + b"\tabcd")
        made += 2 * JOBS_AT_ONCE + len(once) + 3 * len(again)


def _claim(ver: int, at: int, task: bytes, *, attempt: int) -> bytes:
    return b"claim\t%d\t%d\t%s\tqueued\trunning\t%d\t%d\t%d\t%d\t0\tworker-%d\t3" % (
        ver, at, task, attempt, attempt, attempt - 1, at + LEASE_MS, attempt,
    )  # fmt: skip


def _end(kind: bytes, ver: int, at: int, task: bytes, *, attempt: int) -> bytes:
    to_state = b"done" if kind == b"complete" else b"queued"
    return b"%s\t%d\t%d\t%s\trunning\t%s\t%d\t%d\t%d\t0\t%d\tworker-%d\t3" % (
        kind, ver, at, task, to_state, attempt, attempt, attempt, at - 4 + LEASE_MS, attempt,
    )  # fmt: skip


def _each(ids: list[bytes], tail: bytes) -> tuple[bytes, ...]:
    return tuple(part for job_id in ids for part in (b"e", b"%s\t%s" % (job_id, tail)))


def _shared(ids: list[bytes], tail: bytes) -> tuple[bytes, ...]:
    return (b"s", b"\t" + tail, b"ids", b"\t".join(ids))


def fill_stream(url: str, key: str, events: int) -> int:
    """Put such a history into a stream; how many events it has."""
    source, total = entries(events), 0
    with BulkRedis(url) as redis:
        while some := list(islice(source, _ENTRIES_AT_ONCE)):
            total += sum(len(lines_of(fields)) for fields in some)
            redis.send_all(
                [hiredis.pack_command((b"XADD", key.encode(), b"*", *each)) for each in some]
            )
    return total


def fill_lake(path: str, events: int, *, had: int = 0, step_ms: int = 1) -> int:
    """Put a history of jobs of four events each into a lake, by columns.

    It goes on after `had` events. Twenty jobs begin every `step_ms`.
    """
    lake = Lake(path)
    lake.begin()
    made, after = had, lake.events.positions([JOURNAL])[JOURNAL]
    while made < had + events:
        count = min(_AT_ONCE, had + events - made) // 4
        table = _columns(made // 4, count, step_ms)
        upto = int(table.column("pos")[-1].as_py())
        rows = pa.concat_tables([table, _offset(after, upto, table.num_rows)])
        lake.events.put_events(rows.to_batches())
        after, made = upto, made + 4 * count
    return made - had


def _offset(after: int, upto: int, units: int) -> pa.Table:
    """The row that says where a range begins and ends."""
    told = msgspec.json.encode({"after": after, "upto": upto, "units": units}).decode()
    row = JournalEvent(seq="", contract="", queue="", job_id="", type=OFFSET, ts_ms=0, data=told)
    return pa.Table.from_batches([rows_of([row], JOURNAL)])


def _columns(first: int, jobs: int, step_ms: int) -> pa.Table:
    """submit, claim, extend, complete of each job, one kind after the other."""
    number = np.arange(first, first + jobs)
    ids = _random_ids(jobs, first)
    kinds = ["submit", "claim", "extend", "complete"]
    at = BEGAN_MS + number // 20 * step_ms
    lease = [0, 15_000, 20_000, 0]
    none = np.zeros(jobs, dtype=np.int64)
    parts = []
    for step, kind in enumerate(kinds):
        ms = at + step * 5
        line = (number % 20) + 20 * step
        pos = np.array([stream_position_number(0, 0, 0)]) + ((ms << 15) << 7) + (step << 7) + line
        values = {
            "journal": _same(JOURNAL, jobs), "pos": pos, "seq": pa.array(pos).cast(pa.string()),
            "contract": _same("streams", jobs), "queue": _same("jobs:stream", jobs), "job_id": ids,
            "type": _same(kind, jobs), "ts_ms": ms, "ver": np.full(jobs, step + 1),
            "task": _one_of("task", number % 7),
            "from_state": _same(["", "queued", "running", "running"][step], jobs),
            "to_state": _same(["queued", "running", "running", "done"][step], jobs),
            "attempt": np.full(jobs, int(step > 0)), "fence": np.full(jobs, int(step > 0)),
            "prev_fence": np.full(jobs, int(step > 1)),
            "lease_until_ms": ms + lease[step] if lease[step] else none,
            "prev_lease_until_ms": ms - 5 + lease[step - 1] if step > 1 else none,
            "worker_id": _one_of("worker-", number % 9) if step else _same("", jobs),
            "max_attempts": np.full(jobs, 3),
        }  # fmt: skip
        columns = [
            pa.array(values.get(field.name, _default(field, jobs))).cast(field.type)
            for field in ARROW
        ]
        parts.append(pa.Table.from_arrays(columns, schema=ARROW))
    return pa.concat_tables(parts).sort_by("pos").combine_chunks()


def _random_ids(count: int, seed: int) -> pa.Array:
    text = np.random.default_rng(seed).bytes(13 * count).hex().encode()
    return pa.array(np.frombuffer(text, dtype="S26")).cast(pa.string())


def _one_of(prefix: str, which: np.ndarray) -> pa.Array:
    names = pa.array([f"{prefix}{n}" for n in range(int(which.max()) + 1)])
    return names.take(pa.array(which))


def _same(text: str, rows: int) -> pa.Array:
    return pa.repeat(pa.scalar(text), rows)


def _default(field: pa.Field, rows: int) -> pa.Array:
    return _same("", rows) if pa.types.is_string(field.type) else np.zeros(rows, dtype=np.int64)
