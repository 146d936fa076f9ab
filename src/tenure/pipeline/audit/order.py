"""A quick check of I22: whether the jobs of each line were claimed in the order of submission.

A line (the jobs of a queue with one priority) is split into time spans. The jobs of one span are
sorted together; of all earlier spans only the latest claim matters. So no line is sorted as a
whole. If all spans are in order, every line is.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from tenure.pipeline.audit.hashing import Hashes, Ints, number_hashes
from tenure.pipeline.audit.invariants import IN_LINE, TIMED
from tenure.pipeline.audit.proof import (
    CLAIM_POS,
    FLAGS,
    KNOWN_AT,
    LINE_H,
    NEVER,
    PLACE_BITS,
    PRIORITY_AT,
    SUBMIT_POS,
    Bools,
    has,
)
from tenure.pipeline.audit.steps import CONTRACTS

PLACE = ("line_h", "priority", "span", "submit_pos", "claim_pos")
SPAN = ("line_h", "priority", "span", "is_mixed", "earliest", "latest")
# Spans of 16 s, or of 16,384 positions if positions hold no time.
SPAN_BITS = 14


def is_in_line(rows: Ints) -> Bools:
    """Whether a job was submitted without delay to a queue that promises FIFO, and claimed."""
    stood = (rows[SUBMIT_POS] < NEVER) & (rows[CLAIM_POS] < NEVER)
    in_line: Bools = stood & has(rows, bits_of(IN_LINE))
    return in_line


def places(rows: Ints, among: Bools) -> Ints:
    """When the jobs chosen by `among` were submitted and claimed, by line: rows of PLACE."""
    here = np.flatnonzero(is_in_line(rows) & among)
    line, flags = rows[LINE_H][here], rows[FLAGS][here]
    submitted, claimed = rows[SUBMIT_POS][here], rows[CLAIM_POS][here]
    is_timed = (flags & bits_of(name for name in IN_LINE if name in TIMED)) != 0
    span = np.where(is_timed, submitted >> (PLACE_BITS + SPAN_BITS), submitted >> SPAN_BITS)
    return np.stack([line, flags >> PRIORITY_AT, span, submitted, claimed])


def span_keys(places: Ints) -> Hashes:
    """The keys of the spans."""
    return number_hashes(*places[:3])


def spans(places: Ints) -> Ints:
    """The spans of these rows, which hold all jobs of their spans: rows of SPAN."""
    line, priority, span, submitted, claimed = places
    sort = np.lexsort((submitted, span, priority, line))
    line, priority, span, claimed = line[sort], priority[sort], span[sort], claimed[sort]
    begins = _changes(line, priority, span)
    if not len(begins):
        return np.empty((len(SPAN), 0), np.int64)
    overtakes = np.zeros(len(claimed), np.int64)
    overtakes[1:] = claimed[1:] < claimed[:-1]
    overtakes[begins] = 0
    return np.stack(
        [
            *(each[begins] for each in (line, priority, span)),
            np.maximum.reduceat(overtakes, begins),
            np.minimum.reduceat(claimed, begins),
            np.maximum.reduceat(claimed, begins),
        ]
    )


def are_mixed(spans: Ints) -> bool:
    """Whether jobs were claimed out of order, within a span or between two spans of a line."""
    line, priority, span, is_mixed, earliest, latest = spans
    if is_mixed.any():
        return True
    sort = np.lexsort((span, priority, line))
    begins = [*_changes(line[sort], priority[sort]), len(sort)]
    for begin, end in pairwise(begins):
        here = sort[begin:end]
        if (np.maximum.accumulate(latest[here])[:-1] > earliest[here][1:]).any():
            return True
    return False


def _changes(*columns: Ints) -> Ints:
    """Where a run of equal values begins."""
    differs = np.zeros(len(columns[0]), np.bool_)
    differs[:1] = True
    for each in columns:
        differs[1:] |= each[1:] != each[:-1]
    return np.flatnonzero(differs)


def bits_of(contracts: Iterable[str]) -> int:
    """The flags of the jobs of these contracts."""
    return sum(1 << (KNOWN_AT + CONTRACTS.index(name)) for name in contracts)
