"""A local clock that is moved forward as cron-parser moves it, through changes of the clock too.

A local time that does not exist is read with the offset before the change; one that exists twice
keeps the offset of the moment it is reached from.
"""

from __future__ import annotations

import calendar
import functools
import re
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

from tenure.core.errors import UsageError

_FIXED = re.compile(r"(?:utc)?([+-]\d{1,2})(?::(\d{2}))?", re.IGNORECASE)
_EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)

Offset = Callable[[int], int]
"""The distance from UTC at a moment; both in milliseconds."""


class Clock:
    """A moment and its local time.

    `skipped` holds the first hour that a clock change left out and the hour it led to, `repeated`
    an hour that begins for the second time.
    """

    def __init__(self, at_ms: int, offset: Offset) -> None:
        self._offset = offset
        self.skipped: tuple[int, int] | None = None
        self.repeated: int | None = None
        self._changes: tuple[object, bool] = (None, False)
        self._go(at_ms)

    @property
    def days_in_month(self) -> int:
        """How many days this month has."""
        return calendar.monthrange(self._local.year, self.month)[1]

    def set(
        self,
        *,
        hour: int | None = None,
        minute: int | None = None,
        second: int | None = None,
        ms: int | None = None,
    ) -> None:
        """Change parts of the local time."""
        local = self._local
        self._go_local(
            local.replace(
                hour=local.hour if hour is None else hour,
                minute=local.minute if minute is None else minute,
                second=local.second if second is None else second,
                microsecond=local.microsecond if ms is None else ms * 1000,
            )
        )

    def add_month(self) -> None:
        """The start of the next month."""
        first = self._local.replace(day=1) + timedelta(days=self.days_in_month)
        day = min(self.day, calendar.monthrange(first.year, first.month)[1])
        self._go_local(first.replace(day=day))
        self._start_of_day(self._local.replace(day=1))

    def add_day(self) -> None:
        """The start of the next day."""
        self._start_of_day(self._local + timedelta(days=1))

    def add_hour(self, every_hour: bool) -> None:
        """The start of the next hour."""
        self._step(3_600_000, {"minute": 0, "second": 0, "ms": 0}, every_hour)

    def add_minute(self, every_hour: bool) -> None:
        """The start of the next minute."""
        self._step(60_000, {"second": 0, "ms": 0}, every_hour)

    def add_second(self, every_hour: bool) -> None:
        """One second later."""
        self._step(1_000, {}, every_hour)

    def changes_today(self) -> bool:
        """Whether the distance from UTC at the start of this day is another than at its end."""
        day = self._local.date()
        if self._changes[0] != day:
            start = self._moment(self._local.replace(hour=0, minute=0, second=0, microsecond=0))
            following = Clock(start, self._offset)
            following.add_day()
            end = following.at_ms - 1
            self._changes = (day, self._offset(start) != self._offset(end))
        return self._changes[1]

    def _step(self, by_ms: int, start: dict[str, int], every_hour: bool) -> None:
        hour, offset = self.hour, self._distance
        self._go(self.at_ms + by_ms)
        if start:
            self.set(**start)
        advance = (self.hour - hour) % 24
        if every_hour:
            return
        if self._distance > offset and advance >= 2:
            self.skipped = ((hour + 1) % 24, self.hour)
        elif advance == 0 and self.minute == 0 and self.second == 0:
            self.repeated = self.hour

    def _start_of_day(self, local: datetime) -> None:
        self._go_local(local)
        self.set(hour=0, minute=0, second=0, ms=0)

    def _go(self, at_ms: int) -> None:
        self.at_ms = at_ms
        self._distance = self._offset(at_ms)
        local = self._local = _EPOCH + timedelta(milliseconds=at_ms + self._distance)
        self.month, self.day, self.weekday = local.month, local.day, local.isoweekday() % 7
        self.hour, self.minute, self.second = local.hour, local.minute, local.second

    def _go_local(self, local: datetime) -> None:
        self._go(self._moment(local))

    def _moment(self, local: datetime) -> int:
        """The moment of a local time, with the offset of this clock where that is possible."""
        wall = (local - _EPOCH) // timedelta(milliseconds=1)
        guess = wall - self._distance
        first = self._offset(guess)
        if first == self._distance:
            return guess
        second = self._offset(wall - first)
        return wall - (first if first == second else min(first, second))


@functools.lru_cache(maxsize=64)
def zone_offset(tz: str) -> Offset:
    """The offsets of a time zone: an IANA name, `utc+2`, `+05:30`, or "" for this process's own."""
    if tz.lower() in ("", "local", "system", "default"):
        return lambda at_ms: (time.localtime(at_ms // 1000).tm_gmtoff or 0) * 1000
    if tz.lower() in ("utc", "gmt"):
        return lambda at_ms: 0
    fixed = _FIXED.fullmatch(tz)
    if fixed:
        minutes = int(fixed[1]) * 60 + int(f"{fixed[1][0]}{fixed[2] or 0}")
        return lambda at_ms: minutes * 60_000
    zone = _zone(tz)

    def offset(at_ms: int) -> int:
        moment = datetime.fromtimestamp(at_ms // 1000, UTC).astimezone(zone)
        away = moment.utcoffset()
        return away // timedelta(milliseconds=1) if away else 0

    return offset


def _zone(tz: str) -> Any:
    # Needed for schedules alone.
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

    try:
        return ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        named = {name.lower(): name for name in available_timezones()}.get(tz.lower())
    if named is None:
        raise UsageError(f"time zone {tz!r} is not known; write it as Europe/Berlin")
    return ZoneInfo(named)
