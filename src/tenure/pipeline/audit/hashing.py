"""Hashes of whole columns: of strings like Spark's `xxhash64`, and of numbers.

A job is identified by the hash of its id. Spark computes the same hash when it looks for the events
of a job, so this must be exactly XXH64. All strings of one length are hashed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Hashes = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

SEED = 42
_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(prime)
    for prime in (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
        0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
    )
)  # fmt: skip
_LANE, _STRIPE = 8, 32
_NOTHING = np.zeros(1, np.uint64)


def text_hashes(texts: pa.Array, seed: int = SEED) -> Hashes:
    """The XXH64 of each text; those of a dictionary are hashed once each."""
    if isinstance(texts, pa.DictionaryArray):
        hashes: Hashes = text_hashes(texts.dictionary, seed)[codes_of(texts)]
        return hashes
    ends = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1]
    begin = int(ends[0]) if len(ends) else 0
    data = np.zeros(int(ends[-1]) - begin + _LANE if len(ends) else _LANE, np.uint8)
    if texts.buffers()[2] is not None:
        data[:-_LANE] = np.frombuffer(texts.buffers()[2], np.uint8)[begin : int(ends[-1])]
    starts = ends[:-1].astype(np.int64) - begin
    lengths = np.diff(ends)
    if len(lengths) and lengths.min() == lengths.max():
        return _of_length(_Lanes(data, int(lengths[0]), len(lengths)), seed)
    hashes = np.empty(len(lengths), np.uint64)
    for length in np.unique(lengths).tolist():
        here = lengths == length
        hashes[here] = _of_length(_Lanes(data, length, starts[here]), seed)
    return hashes


class _Lanes:
    """Strings of one length: `texts` of them side by side, or those at these offsets."""

    def __init__(self, data: npt.NDArray[np.uint8], length: int, texts: int | Ints) -> None:
        self._data, self.length, self._texts = data, length, texts
        self._lanes: Hashes = np.ndarray((len(data) - _LANE + 1,), "<u8", data, strides=(1,))
        self.count = texts if isinstance(texts, int) else len(texts)

    def eight(self, at: int) -> Hashes:
        """Eight bytes of each text from here on, as a number."""
        return self._taken(self._lanes, at)

    def one(self, at: int) -> Hashes:
        """One byte of each text."""
        return self._taken(self._data, at).astype(np.uint64)

    def _taken(self, values: npt.NDArray[Any], at: int) -> npt.NDArray[Any]:
        if isinstance(self._texts, int):
            return values[at :: self.length][: self._texts].copy()
        taken: npt.NDArray[Any] = values[self._texts + at]
        return taken


def text_hash(texts: Sequence[str]) -> int:
    """One hash of several texts, as Spark's `xxhash64` of as many columns."""
    seed = SEED
    for text in texts:
        seed = int(text_hashes(pa.array([text], pa.string()), seed)[0])
    return seed


def number_hashes(*columns: npt.NDArray[np.generic]) -> Hashes:
    """A hash of the whole numbers of each row."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for prime, column in zip(_odd_numbers(len(columns)), columns, strict=True):
        mixed += column.astype(np.int64, copy=False).view(np.uint64) * prime
    _finish(mixed)
    return mixed


def codes_of(texts: pa.DictionaryArray) -> npt.NDArray[np.integer]:
    """Which text of its dictionary each one is."""
    codes: npt.NDArray[np.integer] = texts.indices.to_numpy(zero_copy_only=False)
    return codes


@cache
def _odd_numbers(count: int) -> list[np.uint64]:
    """Independent odd multipliers."""
    made = np.random.default_rng(SEED).integers(1 << 62, 1 << 63, count, dtype=np.uint64)
    return list(made | np.uint64(1))


def _of_length(texts: _Lanes, seed: int) -> Hashes:
    length, begin = texts.length, np.array([seed & (2**64 - 1)], np.uint64)
    striped, whole = length - length % _STRIPE, length - length % _LANE
    hashes = np.empty(texts.count, np.uint64)
    hashes[:] = _striped(texts, striped, begin) if striped else begin + _P5
    hashes += np.uint64(length)
    for at in range(striped, whole, _LANE):
        hashes ^= _round(_NOTHING, texts.eight(at))
        hashes[:] = _turned(hashes, 27) * _P1 + _P4
    if length - whole >= 4:
        hashes ^= (texts.eight(whole) & np.uint64(0xFFFFFFFF)) * _P1
        hashes[:] = _turned(hashes, 23) * _P2 + _P3
        whole += 4
    for at in range(whole, length):
        hashes ^= texts.one(at) * _P5
        hashes[:] = _turned(hashes, 11) * _P1
    _finish(hashes)
    return hashes


def _striped(texts: _Lanes, upto: int, begin: Hashes) -> Hashes:
    sums = [begin + _P1 + _P2, begin + _P2, begin, begin - _P1]
    for at in range(0, upto, _STRIPE):
        sums = [_round(each, texts.eight(at + _LANE * number)) for number, each in enumerate(sums)]
    turns = (1, 7, 12, 18)
    hashes: Hashes = sum(
        (_turned(each, by) for each, by in zip(sums, turns, strict=True)), _NOTHING
    )
    for each in sums:
        hashes = (hashes ^ _round(_NOTHING, each)) * _P1 + _P4
    return hashes


def _round(sums: Hashes, lanes: Hashes) -> Hashes:
    return _turned(sums + lanes * _P2, 31) * _P1


def _turned(values: Hashes, by: int) -> Hashes:
    return (values << np.uint64(by)) | (values >> np.uint64(64 - by))


def _finish(hashes: Hashes) -> None:
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
