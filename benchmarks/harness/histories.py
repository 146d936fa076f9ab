"""Made histories of any size for the pipeline's figures: sound, and as a busy queue leaves them.

Jobs of three to seven events (some fail and run again), lines of many jobs mixed, twenty lines an
entry in a stream; or the same straight into the files of a lake.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from random import Random

import hiredis
import numpy as np
import pyarrow as pa

from leasehold.pipeline.lake.files import LakeFiles
from leasehold.pipeline.lake.layout import EventFile
from leasehold.pipeline.lake.progress import Progress, write_progress
from leasehold.pipeline.schema import ARROW, stream_place
from leasehold.store.bulk import BulkRedis

LINES_PER_ENTRY = 20
BEGAN_MS = 1_794_700_000_000
JOURNAL = "streams-made"
_AT_ONCE = 1_000_000


def lines(events: int, seed: int = 1) -> Iterator[bytes]:
    """Journal lines of the streams contract: submit, claim, complete; one job in ten twice."""
    rng, made, number = Random(seed), 0, 0
    while made < events:
        job = b"%016x-%09d" % (rng.getrandbits(64), number)
        at = BEGAN_MS + made // 50
        task = b"task%d" % (number % 7)
        number += 1
        yield b"%s\tsubmit\t1\t%d\t%s\t\tqueued\t0\t0\t0\t0\t0\t\t3" % (job, at, task)
        yield b"%s\tclaim\t2\t%d\t%s\tqueued\trunning\t1\t1\t0\t%d\t0\tworker-1\t3" % (
            job, at + 5, task, at + 15_005,
        )  # fmt: skip
        made += 3
        if number % 10:
            yield b"%s\tcomplete\t3\t%d\t%s\trunning\tdone\t1\t1\t1\t0\t%d\tworker-1\t3\tabcd" % (
                job, at + 9, task, at + 15_005,
            )  # fmt: skip
            continue
        yield b"%s\tretry\t3\t%d\t%s\trunning\tqueued\t1\t1\t1\t0\t%d\tworker-1\t3\t\t\t503\t%d" % (
            job, at + 9, task, at + 15_005, at + 20,
        )  # fmt: skip
        yield b"%s\tclaim\t4\t%d\t%s\tqueued\trunning\t2\t2\t1\t%d\t0\tworker-2\t3" % (
            job, at + 25, task, at + 15_025,
        )  # fmt: skip
        yield b"%s\tcomplete\t5\t%d\t%s\trunning\tdone\t2\t2\t2\t0\t%d\tworker-2\t3\tabcd" % (
            job, at + 29, task, at + 15_025,
        )  # fmt: skip
        made += 2


def fill_stream(url: str, key: str, events: int) -> int:
    """Put such a history into a stream; how many events it has."""
    source, total = lines(events), 0
    with BulkRedis(url) as redis:
        while True:
            packed: list[bytes] = []
            for _ in range(500):
                entry = list(islice(source, LINES_PER_ENTRY))
                if not entry:
                    break
                total += len(entry)
                flat = [part for line in entry for part in (b"e", line)]
                packed.append(hiredis.pack_command((b"XADD", key.encode(), b"*", *flat)))
            if not packed:
                return total
            redis.send_all(packed)


def fill_lake(path: str, events: int) -> int:
    """Put a history of jobs of four events each into a lake, by columns."""
    lake = LakeFiles(path)
    lake.begin()
    after = made = 0
    while made < events:
        count = min(_AT_ONCE, events - made) // 4
        table = _columns(made // 4, count)
        upto = int(table.column("pos")[-1].as_py())
        file = EventFile("2026-11-15", JOURNAL, after, upto)
        lake.write_table(file.path, table)
        after, made = upto, made + 4 * count
    write_progress(
        lake,
        Progress(
            journal=JOURNAL, url="streams+redis://made/0", upto=f"{BEGAN_MS * 2}-0", rows=made
        ),
    )
    return made


def _columns(first: int, jobs: int) -> pa.Table:
    """submit, claim, extend, complete of each job, one kind after the other."""
    number = np.arange(first, first + jobs)
    ids = _random_ids(jobs, first)
    kinds = ["submit", "claim", "extend", "complete"]
    at = BEGAN_MS + number // 20
    lease = [0, 15_000, 20_000, 0]
    none = np.zeros(jobs, dtype=np.int64)
    parts = []
    for step, kind in enumerate(kinds):
        ms = at + step * 5
        line = (number % 20) + 20 * step
        pos = np.array([stream_place(0, 0, 0)]) + ((ms << 15) << 7) + (step << 7) + line
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
