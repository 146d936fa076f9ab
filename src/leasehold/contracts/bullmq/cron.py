"""Cron patterns as BullMQ users write them: five fields, or six with seconds in front.

Fields take `*`, `?`, lists, ranges, steps and names; the day of the month `L` (the last one), the
day of the week `5L` (the last Friday) and `2#1` (the first Tuesday). When both day fields are
restricted, a day that fits either counts, as everywhere in cron.
"""

from __future__ import annotations

import calendar
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, tzinfo

import msgspec

from leasehold.core.errors import UsageError

_YEARS_MAX = 12
_MONTHS = {name.lower(): n for n, name in enumerate(calendar.month_abbr) if name}
_DAYS = {name: n for n, name in enumerate(("sun", "mon", "tue", "wed", "thu", "fri", "sat"))}
_NICKNAMES = {
    "@yearly": "0 0 0 1 1 *",
    "@annually": "0 0 0 1 1 *",
    "@monthly": "0 0 0 1 * *",
    "@weekly": "0 0 0 * * 0",
    "@daily": "0 0 0 * * *",
    "@midnight": "0 0 0 * * *",
    "@hourly": "0 0 * * * *",
    "@minutely": "0 * * * * *",
    "@secondly": "* * * * * *",
}


class Pattern(msgspec.Struct, frozen=True):
    """A pattern, read: the values each field allows, and the special days."""

    seconds: tuple[int, ...]
    minutes: tuple[int, ...]
    hours: tuple[int, ...]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool
    last_day: bool = False
    last_weekdays: frozenset[int] = frozenset()
    nth_weekdays: frozenset[tuple[int, int]] = frozenset()

    def fits(self, day: datetime) -> bool:
        """Whether this date is one of the pattern's days."""
        if day.month not in self.months:
            return False
        weekday = day.isoweekday() % 7
        last = calendar.monthrange(day.year, day.month)[1]
        by_month = day.day in self.days or (self.last_day and day.day == last)
        by_week = (
            weekday in self.weekdays
            or (weekday in self.last_weekdays and day.day > last - 7)
            or (weekday, (day.day - 1) // 7 + 1) in self.nth_weekdays
        )
        if self.any_day or self.any_weekday:
            return (self.any_day or by_month) and (self.any_weekday or by_week)
        return by_month or by_week


def parse(text: str) -> Pattern:
    """Read a pattern; raises `UsageError` that names the field."""
    fields = _NICKNAMES.get(text.strip().lower(), text).split()
    if len(fields) == 5:
        fields = ["0", *fields]
    if len(fields) != 6:
        raise UsageError(f"cron pattern {text!r} has {len(fields)} fields; it takes 5 or 6")
    second, minute, hour, day, month, weekday = fields
    plain_days = [part for part in day.split(",") if part.upper() != "L"]
    special: list[str] = []
    plain_weekdays: list[str] = []
    for part in weekday.split(","):
        (special if "#" in part or part.upper().endswith("L") else plain_weekdays).append(part)
    return Pattern(
        seconds=tuple(sorted(_values(second, 0, 59, {}, text))),
        minutes=tuple(sorted(_values(minute, 0, 59, {}, text))),
        hours=tuple(sorted(_values(hour, 0, 23, {}, text))),
        days=frozenset(_values(",".join(plain_days), 1, 31, {}, text)),
        months=frozenset(_values(month, 1, 12, _MONTHS, text)),
        weekdays=frozenset(
            value % 7 for value in _values(",".join(plain_weekdays), 0, 7, _DAYS, text)
        ),
        any_day=day in ("*", "?"),
        any_weekday=weekday in ("*", "?"),
        last_day="L" in day.upper().split(","),
        last_weekdays=frozenset(
            _one(part[:-1], 0, 7, _DAYS, text) % 7 for part in special if "#" not in part
        ),
        nth_weekdays=frozenset(_nth(part, text) for part in special if "#" in part),
    )


def next_after(text: str, after_ms: int, tz: str = "", *, utc: bool = True) -> int:
    """The first moment of the pattern after `after_ms`, in ms; times that a clock change skips are
    left out, and times it repeats happen once.

    >>> next_after("0 0 3 * * *", 1794790393461, "Europe/Berlin")
    1794794400000
    """
    pattern = parse(text)
    zone: tzinfo = _zone(tz) if tz else UTC if utc else datetime.now().astimezone().tzinfo or UTC
    start = datetime.fromtimestamp(after_ms // 1000 + 1, zone)
    for moment in _moments(pattern, start, zone):
        at_ms = int(moment.timestamp()) * 1000
        if at_ms > after_ms:
            return at_ms
    raise UsageError(f"cron pattern {text!r} has no moment in the next {_YEARS_MAX} years")


def _moments(pattern: Pattern, start: datetime, zone: tzinfo) -> Iterator[datetime]:
    day = start.replace(hour=0, minute=0, second=0, microsecond=0, tzinfo=None)
    end = day + timedelta(days=366 * _YEARS_MAX)
    floor = (start.hour, start.minute, start.second)
    while day < end:
        if pattern.fits(day):
            for hour in pattern.hours:
                if hour < floor[0]:
                    continue
                for minute in pattern.minutes:
                    if (hour, minute) < floor[:2]:
                        continue
                    for second in pattern.seconds:
                        if (hour, minute, second) >= floor:
                            local = day.replace(hour=hour, minute=minute, second=second)
                            moment = local.replace(tzinfo=zone)
                            back = datetime.fromtimestamp(moment.timestamp(), zone)
                            if back.replace(tzinfo=None) == local:
                                yield moment
        day += timedelta(days=1)
        floor = (0, 0, 0)


def _zone(tz: str) -> tzinfo:
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError  # needed for schedules alone

    try:
        return ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError):
        raise UsageError(f"time zone {tz!r} is not known; write it as Europe/Berlin") from None


def _values(field: str, least: int, most: int, names: dict[str, int], text: str) -> set[int]:
    found: set[int] = set()
    for part in field.split(",") if field else ():
        span, _, step = part.partition("/")
        if step and not (step.isdecimal() and int(step) > 0):
            raise _wrong(part, text)
        if span in ("*", "?"):
            low, high = least, most if most != 7 else 6
        elif "-" in span:
            left, _, right = span.partition("-")
            low, high = _one(left, least, most, names, text), _one(right, least, most, names, text)
        else:
            low = _one(span, least, most, names, text)
            high = most if step else low
        if low > high:
            raise _wrong(part, text)
        found.update(range(low, high + 1, int(step) if step else 1))
    return found


def _one(word: str, least: int, most: int, names: dict[str, int], text: str) -> int:
    value = names.get(word.lower()[:3]) if word[:1].isalpha() else None
    if value is None:
        if not word.isdecimal():
            raise _wrong(word, text)
        value = int(word)
    if not least <= value <= most:
        raise _wrong(word, text)
    return value


def _nth(part: str, text: str) -> tuple[int, int]:
    day, _, nth = part.partition("#")
    return _one(day, 0, 7, _DAYS, text) % 7, _one(nth, 1, 5, {}, text)


def _wrong(part: str, text: str) -> UsageError:
    return UsageError(f"cron pattern {text!r}: {part!r} cannot be read")
