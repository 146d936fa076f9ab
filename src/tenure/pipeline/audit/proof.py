"""The proof: one row per job, made of sums that can be added in any order.

Every event records the state of the job before it and after it. Take the sum of the hashes of the
states after, minus the sum of the hashes of the states before. If the chain of events is unbroken,
only the hash of the last state remains: every other state is added once and subtracted once, and
the first event has no state before. So an unbroken chain is proven without sorting, with an error
probability of 2**-38, and the rows of several parts of a history can be merged. Invariants of a
single event are ordinary conditions.

The row of one event is the proof of a history of one event. So there is one function that makes
rows, from columns, and one that merges them (`merged`). A row is ten integers. A job is identified
by the hash of its id. Values of the last event are packed behind the number of the event, so that
one maximum finds both. A job that is not proven may still be correct: `explain` checks it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tenure.pipeline.audit import steps as step
from tenure.pipeline.audit.hashing import Hashes, Ints, number_hashes, text_hash, text_hashes

Bools = npt.NDArray[np.bool_]

ROW = (
    *("line_h", "job_h", "n", "hi", "x"),
    *("max_pos", "last_pos", "flags", "submit_pos", "claim_pos"),
)
LINE_H, JOB_H, N, HI, X, MAX_POS, LAST_POS, FLAGS, SUBMIT_POS, CLAIM_POS = range(len(ROW))
KEYS = ROW[:2]
_FOLDS: dict[int, Any] = {
    N: np.add, HI: np.maximum, X: np.add, MAX_POS: np.maximum, LAST_POS: np.maximum,
    SUBMIT_POS: np.minimum, CLAIM_POS: np.minimum,
}  # fmt: skip

BAD, LATE_CLOCK, PAUSES, EXPIRED, CUT, STRANGE = 1, 2, 4, 8, 16, 32
KNOWN_AT, PRIORITY_AT = 8, 32
CLOCK_SLACK_MS = 1_000
PLACE_BITS = 22
# A position after all others: there was no such event.
NEVER = 2**63 - 1

# Packed numbers: the event's number, then two bits for what it left, then part of a hash.
_VER_AT, _KIND_AT, _VER_MAX = 40, 38, 1 << 22
_REST, _HASH = (1 << _VER_AT) - 1, (1 << _KIND_AT) - 1
# From the bits of a job's contracts to the number of the last one.
_CODES = np.array([bits.bit_length() - 1 for bits in range(step.CONTRACT_MASK + 1)], np.int64)
_MIX = np.uint64(0x9E3779B97F4A7C15)

# Columns with few distinct strings in a page; NEEDED adds the other columns.
FEW = ("journal", "contract", "queue", "type", "from_state", "to_state", "worker_id")
NEEDED = (
    *FEW, "job_id", "token_h", "pos", "ts_ms", "ver", "attempt", "fence", "prev_fence",
    "lease_until_ms", "prev_lease_until_ms", "priority", "due_ms", "max_attempts",
)  # fmt: skip


def proof(events: pa.RecordBatch, *, cut: Collection[str] = ()) -> Ints:
    """The rows of these events: one per job, or one per event if few jobs have several events.

    `cut` names journals whose beginning is missing.
    """
    return lightened(_of_events(_Page(events), cut))


def merged(rows: Ints) -> Ints:
    """Rows of parts of the history as rows of the whole, one a job."""
    found = pa.array(job_keys(rows)).dictionary_encode()
    return _folded(rows, found.indices.to_numpy(), len(found.dictionary))


def lightened(rows: Ints) -> Ints:
    """As `merged` if that leaves far fewer rows; else unchanged, to be merged later."""
    found = pa.array(job_keys(rows)).dictionary_encode()
    jobs = len(found.dictionary)
    if 4 * jobs > 3 * rows.shape[1]:
        return rows
    return _folded(rows, found.indices.to_numpy(), jobs)


def _folded(rows: Ints, which: Ints, jobs: int) -> Ints:
    count = rows.shape[1]
    if jobs == count:
        return rows
    one_of = np.empty(jobs, np.int64)
    one_of[which] = np.arange(count)
    whole = np.take(rows, one_of, axis=1)
    # These are sums: the row that was copied would count twice.
    whole[[N, X]] = 0
    for number, fold in _FOLDS.items():
        fold.at(whole[number], which, rows[number])
    # Mostly all flags of a job are the same.
    others = np.flatnonzero(rows[FLAGS] != whole[FLAGS][which])
    np.bitwise_or.at(whole[FLAGS], which[others], rows[FLAGS][others])
    return whole


def joined(rows: Ints) -> Ints:
    """As `merged`, where most rows are the only ones of their job."""
    keys = job_keys(rows)
    ordered = np.sort(keys)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(twice):
        return rows
    if 4 * len(twice) > len(keys):
        return merged(rows)
    at = np.searchsorted(twice, keys)
    repeated = twice[np.minimum(at, len(twice) - 1)] == keys
    return np.concatenate([rows[:, ~repeated], merged(rows[:, repeated])], axis=1)


def job_keys(rows: Ints) -> Hashes:
    """The key of a job: its own hash combined with that of its line.

    Two jobs of a line with the same hash are not proven; `explain` distinguishes them.
    """
    keys: Hashes = rows[LINE_H].view(np.uint64) * _MIX + rows[JOB_H].view(np.uint64)
    return keys


def unproven(rows: Ints, *, quiesced: bool) -> Bools:
    """Whether a job's row does not prove the job correct."""
    ends = (rows[HI] ^ rows[X]) & _HASH
    misplaced = (rows[LAST_POS] ^ rows[MAX_POS]) & _REST
    is_broken = begins_late(rows) | (ends != 0) | (misplaced != 0)
    if quiesced:
        is_broken |= ~has_ended(rows)
    broken: Bools = (is_broken & (rows[N] != 0)) | has(rows, BAD)
    return broken


def has_ended(rows: Ints) -> Bools:
    """Whether a job's last step left it finished, removed or expired."""
    ended: Bools = (((rows[HI] >> _KIND_AT) & 3) >= step.FINAL) | has(rows, EXPIRED)
    return ended


def has(rows: Ints, flag: int) -> Bools:
    """Whether an event of the job has this flag."""
    found: Bools = (rows[FLAGS] & flag) != 0
    return found


def begins_late(rows: Ints) -> Bools:
    """Whether some events of a job are missing, usually the first ones."""
    late: Bools = rows[N] != rows[HI] >> _VER_AT
    return late


def contract_codes(rows: Ints) -> Ints:
    """The number of each job's contract, -1 for one that is not known."""
    codes: Ints = _CODES[(rows[FLAGS] >> KNOWN_AT) & step.CONTRACT_MASK]
    return codes


class _Page:
    """Columns of events as numbers, and what their steps are."""

    def __init__(self, events: pa.RecordBatch) -> None:
        self._events = events
        self._numbers: dict[str, Ints] = {}
        self._kinds: dict[int, Bools] = {}
        self.info = step.infos([self.few(name) for name in step.NAMED])

    def __getitem__(self, name: str) -> Ints:
        """A column of numbers; zeros if it is missing."""
        if name not in self._numbers:
            self._numbers[name] = self._read(name)
        return self._numbers[name]

    def _read(self, name: str) -> Ints:
        if name not in self._events.schema.names:
            return np.zeros(len(self._events), np.int64)
        column = self._events.column(name)
        if column.null_count:
            column = pc.fill_null(column, 0)
        numbers: Ints = column.to_numpy().astype(np.int64, copy=False)
        return numbers

    def few(self, name: str) -> pa.DictionaryArray:
        """A column of texts that repeat."""
        column = self.texts(name)
        return column if isinstance(column, pa.DictionaryArray) else column.dictionary_encode()

    def texts(self, name: str) -> pa.Array:
        """A column of texts."""
        if name not in self._events.schema.names:
            return pa.repeat(pa.scalar(""), len(self._events))
        column = self._events.column(name)
        is_plain = isinstance(column, pa.StringArray | pa.DictionaryArray)
        if column.null_count or not is_plain:
            return pc.fill_null(column.cast(pa.string()), "")
        return column

    def is_a(self, bits: int) -> Bools:
        """Whether a step has one of these bits; a step that is not allowed has none."""
        if bits not in self._kinds:
            self._kinds[bits] = (self.info & bits) != 0
        return self._kinds[bits]


def _of_events(page: _Page, cut: Collection[str]) -> Ints:
    """One row per event."""
    ver, pos = page["ver"], page["pos"]
    is_step = ver > 0
    left, saw = _left_and_saw(page)
    number = (ver & (_VER_MAX - 1)) << _VER_AT
    rows = np.empty((len(ROW), len(ver)), np.int64)
    rows[LINE_H] = step.looked_up([page.few(n) for n in ("journal", "contract", "queue")], _line_h)
    rows[JOB_H] = text_hashes(page.texts("job_id")).view(np.int64)
    rows[N] = is_step
    rows[HI] = number | (left & _HASH)
    rows[HI] |= ((page.info >> step.KIND_AT) & step.KIND_MASK) << _KIND_AT
    rows[X] = np.where(is_step, left - saw, 0)
    rows[MAX_POS] = np.where(is_step, pos, 0)
    rows[LAST_POS] = number | (pos & _REST)
    rows[FLAGS] = _flags(page, cut)
    in_line = page.is_a(step.SUBMITS) & (page["due_ms"] == 0)
    rows[SUBMIT_POS] = np.where(in_line, pos, NEVER)
    rows[CLAIM_POS] = np.where(page.is_a(step.CLAIMS), pos, NEVER)
    return rows


@cache
def _line_h(texts: Sequence[str]) -> int:
    return int(np.uint64(text_hash(texts)).view(np.int64))


def _left_and_saw(page: _Page) -> tuple[Ints, Ints]:
    """Hashes of the state after each event, and of the state before it."""
    ver, attempt = page["ver"], page["attempt"]
    who = text_hashes(page.few("worker_id")) ^ (text_hashes(page.texts("token_h")) * _MIX)
    who = who.view(np.int64)
    left = number_hashes(
        ver,
        (page.info >> step.BECOMES_AT) & step.STATE_MASK,
        page["fence"],
        page["lease_until_ms"],
        np.where(page.is_a(step.TO_FINAL), -1, attempt),
        np.where(page.is_a(step.TO_RUNNING), who, 0),
    )
    before = attempt - page.is_a(step.CLAIMS) + page.is_a(step.GIVES_BACK)
    saw = number_hashes(
        ver - 1,
        (page.info >> step.WAS_AT) & step.STATE_MASK,
        page["prev_fence"],
        page["prev_lease_until_ms"],
        np.where(page.is_a(step.FROM_FINAL), -1, before),
        np.where(page.is_a(step.FROM_RUNNING), who, 0),
    )
    # Before the first event there is no state.
    saw[ver == 1] = 0
    return left.view(np.int64), saw.view(np.int64)


def _flags(page: _Page, cut: Collection[str]) -> Ints:
    """Flags of each event: errors of the event itself, and facts about its job."""
    ver = page["ver"]
    allowed = page.is_a(step.ALLOWED)
    flags = ((page.info >> step.CONTRACT_AT) & step.CONTRACT_MASK) << KNOWN_AT
    flags |= BAD * np.where(allowed, _is_bad(page), ver > 0)
    is_behind = (page["pos"] >> PLACE_BITS) - page["ts_ms"] > CLOCK_SLACK_MS
    flags |= LATE_CLOCK * (is_behind & page.is_a(step.IN_TIME))
    flags |= STRANGE * ((ver == 1) & page.is_a(step.CLAIMS))
    flags |= PAUSES * page.is_a(step.PAUSES)
    flags |= EXPIRED * (page.is_a(step.EXPIRES) & (ver == 0))
    if cut:
        flags |= CUT * step.looked_up([page.few("journal")], lambda texts: texts[0] in cut)
    flags |= np.where(page.is_a(step.SUBMITS), page["priority"] << PRIORITY_AT, 0)
    return flags


def _is_bad(page: _Page) -> Bools:
    """Whether the numbers of an allowed step are wrong."""
    ver, attempt, fence = page["ver"], page["attempt"], page["fence"]
    lease, held = page["lease_until_ms"], page["prev_lease_until_ms"]
    limit, submits = page["max_attempts"], page.is_a(step.SUBMITS)
    bad: Bools = ((lease > 0) != page.is_a(step.TO_RUNNING)) & ~page.is_a(step.REMOVES)
    bad |= fence != page["prev_fence"] + page.is_a(step.CLAIMS)
    bad |= page.is_a(step.REAPS) & (page["ts_ms"] < held)
    bad |= page.is_a(step.EXTENDS) & (lease < held)
    bad |= (limit > 0) & (attempt > limit)
    bad |= page.is_a(step.SUBMITS + step.REOPENS) & (attempt != 0)
    bad |= submits & ((fence != 0) | (ver != 1))
    bad |= (ver == 1) & ~page.is_a(step.SUBMITS + step.CLAIMS)
    bad |= (ver <= 0) | (ver >= _VER_MAX)
    return bad
