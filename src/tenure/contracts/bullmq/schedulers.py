"""A local clock that is moved forward as cron-parser moves it, through changes of the clock too.

A local time that does not exist is read with the offset before the change; one that exists twice
keeps the offset of the moment it is reached from.
"""

from __future__ import annotations

import calendar
import functools
import math
import random
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from tenure.contracts.bullmq.scripts import Scripts
from tenure.core.errors import UsageError
from tenure.store.redis import Arg, Redis

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
    later = _greater(hours, now.hour)
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
    later = _greater(pattern.minutes, now.minute)
    if later is None:
        now.add_hour(len(pattern.hours) == 24)
    now.set(minute=pattern.minutes[0] if later is None else later)
    now.set(second=pattern.seconds[0])


def _to_second(pattern: Pattern, now: Clock) -> None:
    later = _greater(pattern.seconds, now.second)
    if later is None:
        now.add_minute(len(pattern.hours) == 24)
    now.set(second=pattern.seconds[0] if later is None else later)


def _greater(values: tuple[int, ...], than: int) -> int | None:
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


_FIELDS = ("tz", "limit", "pattern", "endDate", "every", "startDate", "offset")


class Picked(msgspec.Struct, frozen=True):
    """A job that a scheduler made, as it was picked up."""

    job_id: str
    name: bytes
    data: bytes
    opts: bytes


class Scheduler:
    """The schedulers of one queue."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis = redis
        self._scripts = scripts

    async def follow(self, scheduler_id: str, job: Picked) -> str:
        """Make the job after `job`, which was just picked up; "" when there is none to make.

        Raises `UsageError` when the next run cannot be computed here.
        """
        told = msgspec.json.decode(job.opts)
        repeat = told.get("repeat") if isinstance(told, dict) else None
        if not isinstance(repeat, dict):
            return ""
        now = await self._redis.server_time_ms()
        count = _int(repeat.get("count")) + 1
        if repeat.get("limit") is not None and count > _int(repeat["limit"]):
            return ""
        if repeat.get("endDate") and now > _ms(repeat["endDate"]):
            return ""
        following = {name: value for name, value in repeat.items() if name != "immediately"}
        following["count"] = count
        stem, next_ms = f"repeat:{scheduler_id}:", ""
        after = max(now, _int(told.get("prevMillis")))
        if pattern := repeat.get("pattern") or repeat.get("cron"):
            at_ms = _next_run(str(pattern), repeat, after)
            if repeat.get("endDate") and at_ms > _ms(repeat["endDate"]):
                return ""
            next_ms = str(at_ms)
        elif scheduler_id.count(":") > 3 and not job.job_id.startswith(stem):
            # As BullMQ up to 3 kept them: on the grid of the clock.
            every = max(1, _int(repeat.get("every")))
            next_ms = str(after // every * every + every)
        if not job.job_id.startswith(stem):
            stem = job.job_id[: job.job_id.rfind(":") + 1]
        return await self._run(
            "follow",
            scheduler_id,
            next_ms,
            following,
            job.job_id,
            job.data,
            job.opts,
            job.name,
            stem,
        )

    async def upsert(
        self,
        scheduler_id: str,
        repeat: Mapping[str, Any],
        *,
        name: str,
        data: bytes,
        opts: bytes,
    ) -> str:
        """Set a scheduler up, or change it; returns the id of its next job."""
        if bool(repeat.get("every")) == bool(repeat.get("pattern")):
            raise UsageError("a scheduler has either `every` (ms) or `pattern` (cron)")
        if repeat.get("immediately") and repeat.get("startDate"):
            raise UsageError("a scheduler has either `immediately` or `startDate`")
        now = await self._redis.server_time_ms()
        kept = {key: value for key, value in repeat.items() if value is not None}
        next_ms: Arg = now if kept.pop("immediately", None) and repeat.get("pattern") else ""
        if repeat.get("pattern") and not next_ms:
            next_ms = _next_run(repeat["pattern"], repeat, now)
        fields: list[Arg] = []
        for field in _FIELDS:
            if field in kept:
                value = kept[field]
                fields += (field, _ms(value) if field.endswith("Date") else value)
        rest: tuple[Arg, ...] = (data, opts, *fields)
        return await self._run("upsert", scheduler_id, next_ms, {**kept, "count": 1}, name, *rest)

    async def remove(self, scheduler_id: str) -> bool:
        """Take a scheduler away; a job of it that waits already still runs."""
        return bool(await self._run("remove", scheduler_id, "", {}, ""))

    async def _run(
        self, verb: str, scheduler_id: str, next_ms: Arg, repeat: Any, name: str, *rest: Arg
    ) -> str:
        args: tuple[Arg, ...] = (verb, scheduler_id, next_ms, msgspec.json.encode(repeat), name)
        reply = await self._scripts.run("schedule", *args, *rest)
        return reply.decode() if reply else ""


def _next_run(pattern: str, repeat: Mapping[str, Any], after_ms: int) -> int:
    """The next time of a pattern, by the options that BullMQ hands to its cron parser."""
    if repeat.get("startDate"):
        after_ms = max(after_ms, _ms(repeat["startDate"]))
    tz = "UTC" if repeat.get("utc") is True else str(repeat.get("tz") or "")
    return next_after(pattern, after_ms, tz, seed=str(repeat.get("hashSeed") or ""))


def _int(value: Any) -> int:
    """A count in the options of another program; 0 for what is none."""
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0


def _ms(moment: Any) -> int:
    """A date as BullMQ takes it: milliseconds, or an ISO text."""
    try:
        if isinstance(moment, int | float):
            return int(moment)
        return int(datetime.fromisoformat(str(moment)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise UsageError(f"{moment!r} is no date; write milliseconds or an ISO text") from None
