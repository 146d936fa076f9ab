"""Reads journals that are Redis streams, in ranges of entry ids.

Redis cannot count the entries between two ids. But an id begins with a time. So the end of a batch
of about N entries is interpolated, and a range is split into parts of equal time.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa

from tenure.core.journal import StreamFormat
from tenure.pipeline.source.lines import LineParser
from tenure.pipeline.source.range_reader import (
    Head,
    Loss,
    Range,
    Read,
    gone_by_count,
    lost_by_count,
)
from tenure.store.journal import lines_of
from tenure.store.redis import BulkRedis

_PAGE = 5_000
_NOTHING = "0-0"
_SAMPLE = 10


class StreamRangeReader:
    """Reads the stream that a `StreamFormat` describes."""

    def __init__(self, fmt: StreamFormat, journal: str) -> None:
        self._format = fmt
        self._parser = LineParser(fmt, journal)
        self._redis = BulkRedis(fmt.store, key=fmt.key)

    def head(self) -> Head:
        """By XINFO; servers before 7.0 do not count what was ever added."""
        if not self._redis.call("EXISTS", self._format.key):
            return Head(added=0, length=0)
        flat = self._redis.call("XINFO", "STREAM", self._format.key)
        info: dict[str, Any] = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        first = info["first-entry"]
        return Head(
            first=first[0].decode() if first else "",
            last=info["last-generated-id"].decode(),
            added=int(info.get("entries-added", -1)),
            length=int(info["length"]),
        )

    def bound(self, after: str, rows_max: int, head: Head) -> str:
        """By interpolation, and by how many lines the next entries have; at least one entry."""
        if head.length <= 0:
            return after
        here = f"({after}" if after else "-"
        following = self._redis.call("XRANGE", self._format.key, here, "+", "COUNT", _SAMPLE)
        lines = sum(len(lines_of(entry[1])) for entry in following) or 1
        units_max = max(1, rows_max * max(1, len(following)) // lines)
        begin = max(_ms(after), _ms(head.first) - 1)
        span = max(1, _ms(head.last) - _ms(head.first))
        end = begin + max(1, round(units_max * span / head.length))
        if end >= _ms(head.last):
            return head.last
        if following and _ms(following[0][0].decode()) > end:
            end = _ms(following[0][0].decode())
        return min((f"{end}-{2**64 - 1}", head.last), key=_parts)

    def gone(self, head: Head) -> int:
        """As the server counts."""
        return gone_by_count(head)

    def lost(self, after: str, read: int, head: Head) -> Loss:
        """As the server counts."""
        return lost_by_count(after, read, head)

    def split(self, after: str, upto: str, parts: int) -> list[Range]:
        """Into ranges of equal time, from the first entry that is there."""
        first = self._redis.call(
            "XRANGE", self._format.key, f"({after}" if after else "-", upto, "COUNT", 1
        )
        if not first:
            return [(after, upto)]
        begin, end = _ms(first[0][0].decode()), _ms(upto)
        cuts = sorted({begin + (end - begin) * n // parts for n in range(1, parts)} - {end})
        edges = [after, *(f"{cut}-{2**64 - 1}" for cut in cuts if cut >= begin), upto]
        return list(pairwise(edges))

    def read(self, after: str, upto: str, seen: Read) -> Iterator[pa.RecordBatch]:
        """Page by page; the server prepares the next page while this one is converted."""
        for page in self._redis.pages(self._format.key, after, upto, _PAGE):
            batch = self._parser.batch(page)
            seen.units += len(page)
            seen.rows += batch.num_rows
            yield batch

    def captured(self, upto: str, reader: str) -> None:
        """Written to the hash that upkeep reads before it trims; all readers share one entry."""
        key, field = self._format.captured
        if key and upto:
            self._redis.call("HSET", key, field, upto)
        elif key:
            self._redis.call("HDEL", key, field)

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()


def _ms(position: str) -> int:
    return _parts(position)[0]


def _parts(position: str) -> tuple[int, int]:
    ms, _, entry = (position or _NOTHING).partition("-")
    return int(ms), int(entry or 0)
