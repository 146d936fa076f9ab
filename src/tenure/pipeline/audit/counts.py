"""Counts of jobs by contract and kind; counts of parts can be added."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from tenure.pipeline.audit import order
from tenure.pipeline.audit.hashing import Ints
from tenure.pipeline.audit.proof import (
    CUT,
    LATE_CLOCK,
    PAUSES,
    STRANGE,
    Bools,
    N,
    begins_late,
    contract_codes,
    has,
    has_ended,
)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Jobs of one contract (`code`, -1: not known), and of these some.

    `again` are jobs whose first events are missing although their journal is complete: an earlier
    audit saw them end. `looked_at` were not proven. `strange` ones were submitted by another
    program, which wrote no event.
    """

    code: int
    jobs: int = 0
    events: int = 0
    open_jobs: int = 0
    open_events: int = 0
    again: int = 0
    begins_late: int = 0
    looked_at: int = 0
    strange: int = 0
    late: int = 0
    pauses: int = 0
    in_line: int = 0


def counted(rows: Ints, in_doubt: Bools) -> bytes:
    """The counts of these jobs, packed."""
    is_job, is_open = rows[N] > 0, ~has_ended(rows)
    lacks = is_job & begins_late(rows)
    strange = has(rows, STRANGE) & ~is_open & ~in_doubt
    sorts: dict[str, Bools] = {
        "jobs": is_job,
        "open_jobs": is_job & is_open,
        "again": lacks & ~has(rows, CUT),
        "begins_late": lacks & has(rows, CUT),
        "looked_at": in_doubt,
        "strange": strange,
        "late": has(rows, LATE_CLOCK),
        "pauses": has(rows, PAUSES),
        "in_line": order.is_in_line(rows),
    }
    codes = contract_codes(rows) + 1
    present = np.unique(codes)
    found = {int(code): {"code": int(code) - 1} for code in present}
    for name, which in sorts.items():
        for code, count in enumerate(np.bincount(codes[which])):
            if code in found:
                found[code][name] = int(count)
    for code, some in found.items():
        here = codes == code
        some["events"] = int(rows[N][here].sum())
        some["open_events"] = int(rows[N][here & is_open].sum())
    return msgspec.json.encode(list(found.values()))


def added(packed: Iterable[bytes]) -> list[Counts]:
    """The sums of packed counts, by contract."""
    sums: dict[int, Counts] = {}
    for blob in packed:
        for each in msgspec.json.decode(blob, type=list[Counts]):
            sums[each.code] = _sum(sums.get(each.code, Counts(code=each.code)), each)
    return list(sums.values())


def _sum(one: Counts, other: Counts) -> Counts:
    fields = (name for name in Counts.__struct_fields__ if name != "code")
    sums = {name: getattr(one, name) + getattr(other, name) for name in fields}
    return Counts(code=one.code, **sums)
