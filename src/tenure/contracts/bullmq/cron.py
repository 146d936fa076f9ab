"""Cron patterns as Node's BullMQ reads them, by the package cron-parser: one to six fields.

Five fields begin with the minute, six with the second; missing ones stand in front, as `0` for the
second and `*` for the rest. Fields take `*`, `?`, lists, ranges, steps, names and `H` (a value by
chance, or by the option `hashSeed`); the day of the month `L` (the last one), the day of the week
`5L` (the last Friday) and `2#1` (the first Tuesday). When both day fields are restricted, a day
that fits either counts. Where cron-parser 4 (BullMQ 5) and 5 (BullMQ 6) differ, 5 rules; what only
4 accepts, such as a value that is listed twice, is read as well.
"""

from __future__ import annotations

import math
import random
import re

import msgspec

from tenure.contracts.bullmq.cron_clock import Clock, zone_offset
from tenure.core.errors import UsageError

_STEPS_MAX = 10_000  # where cron-parser gives up as well
_LENGTH_MAX = 1_024
_DEFAULTS = ("0", "*", "*", "*", "*", "*")
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_NAMES = {name: n for n, name in enumerate(_DAYS)} | {
    name: n for n, name in enumerate(_MONTHS, start=1)
}
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
    "@weekdays": "0 0 0 * * 1-5",
    "@weekends": "0 0 0 * * 0,6",
}
_HASHED = re.compile(r"H(?:\((\d+)-(\d+)\))?(?:/(\d+))?")
_LAST = re.compile(r"\d{0,2}L")


class Pattern(msgspec.Struct, frozen=True):
    """A pattern, read: the values each field allows, and the special days.

    `nth` counts the weekday within its month; 0 takes all.
    """

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
    nth: int = 0

    def fits(self, now: Clock) -> bool:
        """Whether this date is one of the pattern's days; the month is looked at elsewhere."""
        last = now.days_in_month
        by_month = now.day in self.days or (self.last_day and now.day == last)
        by_week = (
            now.weekday in self.weekdays and (not self.nth or math.ceil(now.day / 7) == self.nth)
        ) or (now.weekday in self.last_weekdays and now.day > last - 7)
        if self.any_weekday:
            return by_month
        return by_week or (by_month and not self.any_day)


def parse(text: str, *, seed: str = "") -> Pattern:
    """Read a pattern; raises `UsageError` that names the field. `seed` decides what `H` means."""
    if len(text) > _LENGTH_MAX:
        raise UsageError(f"a cron pattern has at most {_LENGTH_MAX} characters, not {len(text)}")
    fields = _NICKNAMES.get(text, text).split()
    if not 1 <= len(fields) <= 6:
        raise UsageError(f"cron pattern {text!r} has {len(fields)} fields; it takes 1 to 6")
    fields = [*_DEFAULTS[: 6 - len(fields)], *fields]
    chances = _chances(seed)
    read = _Reader(text, chances)
    second, minute, hour, day, month, weekday = fields
    # In the order in which cron-parser draws its chances.
    seconds, minutes, hours = (read(field, 0, most) for field, most in zip(
        (second, minute, hour), (59, 59, 23), strict=True
    ))  # fmt: skip
    months = read(month, 1, 12, names=True)
    days = read(day, 1, 31, last=True)
    plain, _, nth = weekday.partition("#")
    if nth and (not nth.isdecimal() or not 1 <= int(nth) <= 5 or re.search("[,/-]", weekday)):
        raise _wrong(weekday, text)
    weekdays = read(plain, 0, 7, names=True, last=True)
    if "L" in weekdays:
        raise _wrong(weekday, text)
    return Pattern(
        seconds=tuple(sorted(_numbers(seconds))),
        minutes=tuple(sorted(_numbers(minutes))),
        hours=tuple(sorted(_numbers(hours))),
        days=frozenset(_numbers(days)),
        months=frozenset(_numbers(months)),
        weekdays=frozenset(value % 7 for value in _numbers(weekdays)),
        any_day=day in ("*", "?"),
        any_weekday=weekday in ("*", "?"),
        last_day=any(isinstance(value, str) for value in days),
        last_weekdays=frozenset(int(v[0]) % 7 for v in weekdays if isinstance(v, str)),
        nth=int(nth or 0),
    )


def next_after(text: str, after_ms: int, tz: str = "", *, seed: str = "") -> int:
    """The first moment of the pattern after `after_ms`, in ms. Without `tz` the local time of this
    process counts, as in Node.

    A time that a clock change skips happens in the hour that follows; one that is repeated happens
    once.

    >>> next_after("0 0 3 * * *", 1794790393461, "Europe/Berlin")
    1794794400000
    """
    pattern = parse(text, seed=seed)
    now = Clock(after_ms, zone_offset(tz))
    every_hour = len(pattern.hours) == 24
    if after_ms % 1000:
        now.set(ms=0)
        now.add_second(every_hour)
    for _ in range(_STEPS_MAX):
        if now.month not in pattern.months:
            now.add_month()
        elif not pattern.fits(now):
            now.add_day()
        elif not _at_hour(pattern, now):
            pass
        elif now.minute not in pattern.minutes:
            _to_minute(pattern, now)
        elif now.second not in pattern.seconds:
            _to_second(pattern, now)
        elif now.at_ms == after_ms:
            now.add_second(every_hour)
        else:
            return now.at_ms
    raise UsageError(f"cron pattern {text!r} has no moment after {after_ms} that could be found")


def _at_hour(pattern: Pattern, now: Clock) -> bool:
    """Whether this hour is one of the pattern's; moves on if it is not."""
    hours, every_hour = pattern.hours, len(pattern.hours) == 24
    if now.skipped and now.skipped[1] == now.hour:
        # A clock change left hours out: one that was wanted happens in the hour after them.
        hour = now.skipped[0]
        while hour != now.hour:
            if hour in hours:
                return True
            hour = (hour + 1) % 24
    if now.repeated == now.hour:
        now.repeated = None
        now.add_hour(every_hour)
        return False
    if now.hour in hours:
        return True
    now.skipped = None
    later = _next(hours, now.hour)
    if later is None:
        now.add_day()
        return False
    if now.changes_today():
        for _ in range(later - now.hour):
            now.add_hour(every_hour)
            if now.hour >= later:
                break
    else:
        now.set(hour=later)
    now.set(minute=pattern.minutes[0])
    now.set(second=pattern.seconds[0])
    return False


def _to_minute(pattern: Pattern, now: Clock) -> None:
    later = _next(pattern.minutes, now.minute)
    if later is None:
        now.add_hour(len(pattern.hours) == 24)
    now.set(minute=pattern.minutes[0] if later is None else later)
    now.set(second=pattern.seconds[0])


def _to_second(pattern: Pattern, now: Clock) -> None:
    later = _next(pattern.seconds, now.second)
    if later is None:
        now.add_minute(len(pattern.hours) == 24)
    now.set(second=pattern.seconds[0] if later is None else later)


def _next(values: tuple[int, ...], than: int) -> int | None:
    return next((value for value in values if value > than), None)


def _numbers(values: list[int | str]) -> list[int]:
    return [value for value in values if isinstance(value, int)]


class _Reader:
    """Reads the fields of one pattern; each takes one chance, whether it has an `H` or not."""

    def __init__(self, text: str, chances: random.Random | _Seeded) -> None:
        self._text = text
        self._chances = chances

    def __call__(
        self, field: str, least: int, most: int, *, names: bool = False, last: bool = False
    ) -> list[int | str]:
        if names:
            field = re.sub("[A-Za-z]{3}", self._named, field)
        chance = self._chances.random()
        field = re.sub(r"[*?]", f"{least}-{most}", field)
        field = _HASHED.sub(lambda found: self._hashed(found, least, most, chance), field)
        values: list[int | str] = []
        for part in field.split(","):
            if last and _LAST.fullmatch(part):
                values.append(part)
            else:
                values += self._span(part, least, most)
        return values

    def _named(self, found: re.Match[str]) -> str:
        name = found[0].lower()
        if name not in _NAMES:
            raise _wrong(found[0], self._text)
        return str(_NAMES[name])

    def _span(self, part: str, least: int, most: int) -> list[int | str]:
        span, slash, step = part.partition("/")
        low, dash, high = span.partition("-")
        words = [low, *([high] if dash else []), *([step] if slash else [])]
        if not all(word.isascii() and word.isdecimal() for word in words):
            raise _wrong(part, self._text)
        first = int(low)
        end = int(high) if dash else most if slash else first
        stride = int(step) if slash else 1
        if not least <= first <= end <= most or stride < 1:
            raise _wrong(part, self._text)
        return list(range(first, end + 1, stride))

    def _hashed(self, found: re.Match[str], least: int, most: int, chance: float) -> str:
        low, high, step = found[1], found[2], found[3]
        if low and int(low) > int(high):
            raise _wrong(found[0], self._text)
        first, end = (max(int(low), least), min(int(high), most)) if low else (least, most)
        if first > end or (step and int(step) < 1):
            raise _wrong(found[0], self._text)
        values: list[int] = []
        if step:
            stride = int(step)
            start = first // stride * stride + math.floor(chance * stride)
            values = [value for value in range(start, end + 1, stride) if value >= first]
        values = values or [math.floor(chance * (end - first + 1)) + first]
        return ",".join(str(value) for value in values)


class _Seeded:
    """cron-parser's chances: mulberry32 over an FNV-1a hash of the seed's UTF-16 units."""

    def __init__(self, seed: str) -> None:
        state = 2_166_136_261
        units = seed.encode("utf-16-le", "surrogatepass")
        for low, high in zip(units[::2], units[1::2], strict=True):
            state = (state ^ (low | high << 8)) * 16_777_619 & 0xFFFFFFFF
        self._state = state

    def random(self) -> float:
        self._state += 0x6D2B79F5
        word = self._state & 0xFFFFFFFF
        mixed = (word ^ word >> 15) * (word | 1) & 0xFFFFFFFF
        mixed ^= mixed + ((mixed ^ mixed >> 7) * (mixed | 61) & 0xFFFFFFFF) & 0xFFFFFFFF
        return (mixed ^ mixed >> 14) / 4_294_967_296


def _chances(seed: str) -> random.Random | _Seeded:
    return _Seeded(seed) if seed else random.Random()


def _wrong(part: str, text: str) -> UsageError:
    return UsageError(f"cron pattern {text!r}: {part!r} cannot be read")
