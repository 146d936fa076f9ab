"""Job schedulers: a template from which jobs are made, by an interval or a cron pattern.

There is no clock process. When a worker picks up the job of a scheduler, it stores the next one. A
Python worker must compute the same time as a Node worker. The libraries cronsim and croniter do
not: of 444 random patterns that Node's cron-parser accepts they refuse or misread nine in ten (`H`,
one to four fields, `*#2`), and they move a time that a clock change skips to the end of the gap.
"""

from __future__ import annotations

import calendar
import functools
import math
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import msgspec

from tenure.contracts.bullmq.records import text_of
from tenure.contracts.bullmq.scripts import Scripts
from tenure.core.errors import UsageError
from tenure.store.redis import Arg, Redis
from tenure.store.redis_queue import fields_of, number, read_all

_FIELDS = ("tz", "limit", "pattern", "endDate", "every", "startDate", "offset")


class PickedJob(msgspec.Struct, frozen=True):
    """A job of a scheduler that was just picked up."""

    job_id: str
    name: bytes
    data: bytes
    opts: bytes


class Scheduler:
    """The schedulers of one queue."""

    def __init__(self, redis: Redis, scripts: Scripts) -> None:
        self._redis = redis
        self._scripts = scripts

    async def follow(self, scheduler_id: str, job: PickedJob) -> str:
        """Store the job after `job` and return its id; "" if there is no next job.

        Raises `UsageError` if the next run cannot be computed here.
        """
        options = msgspec.json.decode(job.opts)
        repeat = options.get("repeat") if isinstance(options, dict) else None
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
        after = max(now, _int(options.get("prevMillis")))
        if pattern := repeat.get("pattern") or repeat.get("cron"):
            at_ms = _next_run(str(pattern), repeat, after)
            if repeat.get("endDate") and at_ms > _ms(repeat["endDate"]):
                return ""
            next_ms = str(at_ms)
        elif scheduler_id.count(":") > 3 and not job.job_id.startswith(stem):
            # A repeatable job as BullMQ up to 3 has it: multiples of the interval.
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
        own: Mapping[str, str] | None = None,
        only_changed: bool = False,
    ) -> str:
        """Set up a scheduler, or change it; returns the id of its next job.

        `own` are fields of its hash that BullMQ does not know. With `only_changed` a scheduler that
        is the same already is left alone, with the job that it has stored.
        """
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
        for field, value in (own or {}).items():
            fields += (field, value)
        rest: tuple[Arg, ...] = (data, opts, *fields)
        verb = "declare" if only_changed else "upsert"
        return await self._run(verb, scheduler_id, next_ms, {**kept, "count": 1}, name, *rest)

    async def remove(self, scheduler_id: str) -> bool:
        """Remove a scheduler; False if there is none. A job of it that waits already still runs."""
        return bool(await self._run("remove", scheduler_id, "", {}, ""))

    async def _run(
        self, verb: str, scheduler_id: str, next_ms: Arg, repeat: Any, name: str, *rest: Arg
    ) -> str:
        args: tuple[Arg, ...] = (verb, scheduler_id, next_ms, msgspec.json.encode(repeat), name)
        reply = await self._scripts.run("schedule", *args, *rest)
        return reply.decode() if reply else ""


async def read_schedulers(
    redis: Redis, prefix: str, start: int = 0, end: int = -1
) -> list[tuple[str, int, dict[str, bytes]]]:
    """Id, next time and raw hash of each scheduler, the next one due first."""
    repeat = prefix + "repeat"
    (ranked,) = await read_all(redis, [("ZRANGE", repeat, start, end, "WITHSCORES")])
    flat = ranked or ()
    named = {text_of(each): number(due) for each, due in zip(flat[::2], flat[1::2], strict=True)}
    named.pop("", None)
    hashes = await read_all(redis, [("HGETALL", f"{repeat}:{each}") for each in named])
    return [
        (each, due, fields_of(raw))
        for (each, due), raw in zip(named.items(), hashes, strict=True)
        if raw is not None
    ]


def _next_run(pattern: str, repeat: Mapping[str, Any], after_ms: int) -> int:
    """The next time of a pattern, by the options that BullMQ passes to its cron parser."""
    if repeat.get("startDate"):
        after_ms = max(after_ms, _ms(repeat["startDate"]))
    tz = "UTC" if repeat.get("utc") is True else str(repeat.get("tz") or "")
    return next_after(pattern, after_ms, tz, seed=str(repeat.get("hashSeed") or ""))


def _int(value: Any) -> int:
    """A count in the options of another program; 0 if it is not a number."""
    try:
        return int(value or 0)
    except (TypeError, ValueError, OverflowError):
        return 0


def _ms(moment: Any) -> int:
    """A date as BullMQ takes it: milliseconds or an ISO text."""
    try:
        if isinstance(moment, int | float):
            return int(moment)
        return int(datetime.fromisoformat(str(moment)).timestamp() * 1000)
    except (ValueError, OverflowError):
        raise UsageError(f"{moment!r} is no date; write milliseconds or an ISO text") from None


# -- cron patterns, as cron-parser reads them ----------------------------------------------------

_STEPS_MAX = 10_000  # as in cron-parser
_LENGTH_MAX = 1_024
_HOUR_MS = 3_600_000
_EPOCH = datetime.fromtimestamp(0, UTC).replace(tzinfo=None)
_DEFAULTS = ("0", "*", "*", "*", "*", "*")
_DAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_NAMES = {
    **{name: n for n, name in enumerate(_DAYS)},
    **{name: n for n, name in enumerate(_MONTHS, start=1)},
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
_FIXED = re.compile(r"(?:utc)?([+-]\d{1,2})(?::(\d{2}))?", re.IGNORECASE)

Offset = Callable[[int], int]
"""The distance from UTC at a moment; both in milliseconds."""


class Pattern(msgspec.Struct, frozen=True):
    """The values that each field of a pattern allows; `nth` is for a weekday of the month."""

    seconds: list[int]
    minutes: list[int]
    hours: list[int]
    days: set[int]
    months: set[int]
    weekdays: set[int]
    any_day: bool
    any_weekday: bool
    last_day: bool
    last_weekdays: set[int]
    nth: int

    def fits(self, date: datetime) -> bool:
        """Whether a date is one of the pattern's days, if its month is one of the months."""
        day, last = date.day, calendar.monthrange(date.year, date.month)[1]
        weekday = date.isoweekday() % 7
        by_month = day in self.days or (self.last_day and day == last)
        by_week = (
            weekday in self.weekdays and (not self.nth or math.ceil(day / 7) == self.nth)
        ) or (weekday in self.last_weekdays and day > last - 7)
        if self.any_weekday:
            return by_month
        return by_week or (by_month and not self.any_day)


def parse(text: str, *, seed: str = "") -> Pattern:
    """Read a pattern of one to six fields; raises `UsageError` that names what is wrong.

    Five fields begin with the minute, six with the second. Missing fields are `0` for the second
    and `*` for the others. Fields take `*`, `?`, lists, ranges, steps, names and `H` (a random
    value, or one by `seed`). The day of the month takes `L` (the last one), the day of the week
    `5L` (the last Friday) and `2#1` (the first Tuesday). If both day fields are restricted, a day
    that fits one of them counts. Where cron-parser 4 (BullMQ 5) and 5 (BullMQ 6) differ, this
    follows 5; patterns that only 4 accepts, such as a value listed twice, are read too.
    """
    if len(text) > _LENGTH_MAX:
        raise UsageError(f"a cron pattern has at most {_LENGTH_MAX} characters, not {len(text)}")
    if len(seed) > _LENGTH_MAX:  # it is hashed in Python, unit by unit
        raise UsageError(f"cron pattern: a seed has at most {_LENGTH_MAX} characters")
    fields = _NICKNAMES.get(text, text).split()
    if not 1 <= len(fields) <= 6:
        raise UsageError(f"cron pattern {text!r} has {len(fields)} fields; it takes 1 to 6")
    second, minute, hour, day, month, weekday = [*_DEFAULTS[: 6 - len(fields)], *fields]
    chance = _seeded(seed) if seed else random.random
    plain, _, nth = weekday.partition("#")
    try:
        if nth and (not nth.isdecimal() or not 1 <= int(nth) <= 5 or re.search("[,/-]", weekday)):
            raise ValueError(weekday)
        # Each field takes one random number, in the order in which cron-parser draws them.
        seconds, minutes, hours = (
            sorted(_numbers(_values(field, 0, most, chance())))
            for field, most in ((second, 59), (minute, 59), (hour, 23))
        )
        months = _numbers(_values(_numbered(month), 1, 12, chance()))
        days = _values(day, 1, 31, chance(), last=True)
        weekdays = _values(_numbered(plain), 0, 7, chance(), last=True)
        if "L" in weekdays:
            raise ValueError(weekday)
    except ValueError as error:
        raise UsageError(f"cron pattern {text!r}: {str(error)!r} cannot be read") from None
    return Pattern(
        seconds=seconds,
        minutes=minutes,
        hours=hours,
        days=_numbers(days),
        months=months,
        weekdays={value % 7 for value in _numbers(weekdays)},
        any_day=day in ("*", "?"),
        any_weekday=weekday in ("*", "?"),
        last_day=any(isinstance(value, str) for value in days),
        last_weekdays={int(value[0]) % 7 for value in weekdays if isinstance(value, str)},
        nth=int(nth or 0),
    )


def _numbers(values: list[int | str]) -> set[int]:
    return {value for value in values if isinstance(value, int)}


def _numbered(field: str) -> str:
    """The field with numbers for the names of days and months."""

    def number(found: re.Match[str]) -> str:
        name = found[0].lower()
        if name not in _NAMES:
            raise ValueError(found[0])
        return str(_NAMES[name])

    return re.sub("[A-Za-z]{3}", number, field)


def _values(
    field: str, least: int, most: int, chance: float, *, last: bool = False
) -> list[int | str]:
    """The values of one field; with `last` also texts such as `L` and `5L`."""
    field = re.sub(r"[*?]", f"{least}-{most}", field)
    field = _HASHED.sub(lambda found: _hashed(found, least, most, chance), field)
    values: list[int | str] = []
    for part in field.split(","):
        if last and _LAST.fullmatch(part):
            values.append(part)
            continue
        span, slash, step = part.partition("/")
        low, dash, high = span.partition("-")
        words = [low, *([high] if dash else []), *([step] if slash else [])]
        if not all(word.isascii() and word.isdecimal() for word in words):
            raise ValueError(part)
        first = int(low)
        end = int(high) if dash else most if slash else first
        stride = int(step) if slash else 1
        if not least <= first <= end <= most or stride < 1:
            raise ValueError(part)
        values += range(first, end + 1, stride)
    return values


def _hashed(found: re.Match[str], least: int, most: int, chance: float) -> str:
    """The values of `H`, `H(low-high)` or either with a step."""
    low, high, step = found[1], found[2], found[3]
    if low and int(low) > int(high):
        raise ValueError(found[0])
    first, end = (max(int(low), least), min(int(high), most)) if low else (least, most)
    if first > end or (step and int(step) < 1):
        raise ValueError(found[0])
    values: list[int] = []
    if step:
        stride = int(step)
        start = first // stride * stride + math.floor(chance * stride)
        values = [value for value in range(start, end + 1, stride) if value >= first]
    values = values or [math.floor(chance * (end - first + 1)) + first]
    return ",".join(str(value) for value in values)


def _seeded(seed: str) -> Callable[[], float]:
    """cron-parser's random numbers: mulberry32 over an FNV-1a hash of the seed in UTF-16."""
    state = 2_166_136_261
    units = seed.encode("utf-16-le", "surrogatepass")
    for low, high in zip(units[::2], units[1::2], strict=True):
        state = (state ^ (low | high << 8)) * 16_777_619 & 0xFFFFFFFF

    def chance() -> float:
        nonlocal state
        state = state + 0x6D2B79F5 & 0xFFFFFFFF
        mixed = (state ^ state >> 15) * (state | 1) & 0xFFFFFFFF
        mixed ^= mixed + ((mixed ^ mixed >> 7) * (mixed | 61) & 0xFFFFFFFF) & 0xFFFFFFFF
        return (mixed ^ mixed >> 14) / 4_294_967_296

    return chance


def next_after(text: str, after_ms: int, tz: str = "", *, seed: str = "") -> int:
    """The first time of the pattern after `after_ms`, in ms.

    Without `tz` the local time of this process counts, as in Node. A time that a clock change skips
    happens in the following hour. A time that a clock change repeats happens once, unless the
    pattern has every hour.

    >>> next_after("0 0 3 * * *", 1794790393461, "Europe/Berlin")
    1794794400000
    """
    pattern, offset = parse(text, seed=seed), zone_offset(tz)
    local = _EPOCH + timedelta(milliseconds=after_ms + offset(after_ms))
    day = local.replace(hour=0, minute=0, second=0, microsecond=0)
    entry: _Entry = "inside"
    for _ in range(_STEPS_MAX):
        if day.month not in pattern.months:
            day = (day.replace(day=1) + timedelta(days=32)).replace(day=1)
            entry = "jump" if entry == "inside" else "midnight"
            continue
        fits = pattern.fits(day)
        if fits and (found := _first_in(pattern, day, offset, after_ms, entry)):
            return found
        if entry != "inside":
            entry = "midnight"
        else:
            entry = "hour" if fits and 23 in pattern.hours else "jump"
        day += timedelta(days=1)
    raise UsageError(f"cron pattern {text!r} has no time after {after_ms}")


_Entry = Literal["inside", "hour", "jump", "midnight"]
"""How cron-parser reaches a day: it starts inside the day, steps into it by the hour, jumps to it
from another time of day, or goes from midnight to midnight. It matters if the clock changes at
midnight."""


def _first_in(
    pattern: Pattern, day: datetime, offset: Offset, after_ms: int, entry: _Entry
) -> int | None:
    """The first time of the pattern on a day after `after_ms`."""
    wall = (day - _EPOCH) // timedelta(milliseconds=1)
    # No time zone is further from UTC than 14 hours.
    before, later = offset(wall - 14 * _HOUR_MS - 1), offset(wall + 36 * _HOUR_MS)
    if before == later:
        starts = (wall + hour * _HOUR_MS - before for hour in pattern.hours)
        times = (at for start in starts for at in _in_hour(pattern, start, after_ms))
        return next(times, None)
    if entry == "jump" and offset(wall - later) == later:
        after_ms = max(after_ms, wall - later - 1)  # the second of two midnights
    every_hour = len(pattern.hours) == 24
    skipped, begun = False, False
    for hour in range(24):
        starts_by = {each: wall + hour * _HOUR_MS - each for each in (before, later)}
        ends = [(start + edge, each) for each, start in starts_by.items() for edge in _EDGES]
        if not any(offset(at) == each for at, each in ends):  # the clock skips this hour
            skipped = skipped or (hour in pattern.hours and (begun or entry == "hour"))
            continue
        begun = True
        for each, start in starts_by.items():
            if hour not in pattern.hours and not (skipped and after_ms < start):
                continue
            for at in _in_hour(pattern, start, after_ms):
                first_pass = at - start + starts_by[before]
                repeats = each == later and offset(first_pass) == before
                if offset(at) == each and (every_hour or after_ms >= start - 1 or not repeats):
                    return at
        skipped = False
    return None


_EDGES = (0, _HOUR_MS - 1)


def _in_hour(pattern: Pattern, start: int, after_ms: int) -> Iterator[int]:
    """The times of the pattern after `after_ms` in the hour that begins at `start`."""
    if start + _HOUR_MS > after_ms:
        for minute in pattern.minutes:
            at = start + minute * 60_000
            if at + 60_000 > after_ms:
                yield from (
                    at + second * 1_000
                    for second in pattern.seconds
                    if at + second * 1_000 > after_ms
                )


@functools.lru_cache(maxsize=64)
def zone_offset(tz: str) -> Offset:
    """The offsets of a time zone: an IANA name, `utc+2`, `+05:30`, or "" for this process's own."""
    if tz.lower() in ("", "local", "system", "default"):
        return lambda at_ms: (time.localtime(at_ms // 1000).tm_gmtoff or 0) * 1000
    if tz.lower() in ("utc", "gmt"):
        return lambda at_ms: 0
    if fixed := _FIXED.fullmatch(tz):
        minutes = int(fixed[1]) * 60 + int(f"{fixed[1][0]}{fixed[2] or 0}")
        return lambda at_ms: minutes * 60_000
    # Slow to import; only schedules need it.
    from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

    try:
        zone = ZoneInfo(tz)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        named = {name.lower(): name for name in available_timezones()}.get(tz.lower())
        if named is None:
            raise UsageError(f"time zone {tz!r} is not known; write it as Europe/Berlin") from None
        zone = ZoneInfo(named)

    def offset(at_ms: int) -> int:
        away = datetime.fromtimestamp(at_ms // 1000, UTC).astimezone(zone).utcoffset()
        return away // timedelta(milliseconds=1) if away else 0

    return offset
