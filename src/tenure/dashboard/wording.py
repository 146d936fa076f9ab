"""Numbers and times as people say them."""

from __future__ import annotations

from datetime import UTC, datetime

_STEPS = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def duration(ms: float | None) -> str:
    """A length of time in two or three digits.

    >>> [duration(ms) for ms in (0.4, 17, 1_540, 61_000, 5_400_000, 200_000_000, None)]
    ['<1 ms', '17 ms', '1.5 s', '1 min', '1.5 h', '2.3 d', '-']
    """
    if ms is None:
        return "-"
    if ms < 1:
        return "<1 ms" if ms > 0 else "0 ms"
    if ms < 1_000:
        return f"{ms:.0f} ms"
    for size, unit in _STEPS:
        if ms >= size:
            number = ms / size
            text = f"{number:.0f}" if number >= 10 else f"{number:.1f}".removesuffix(".0")
            return f"{text} {unit}"
    return f"{ms:.0f} ms"


def number(value: float) -> str:
    """Thousands apart, small rates with a decimal.

    >>> number(1234567), number(0.25), number(12.0)
    ('1 234 567', '0.25', '12')
    """
    if value == int(value):
        return f"{int(value):,}".replace(",", " ")
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}".replace(",", " ")


def share(value: float) -> str:
    """A part of the whole.

    >>> share(0.0), share(0.004), share(0.5)
    ('0 %', '0.4 %', '50 %')
    """
    percent = value * 100
    return f"{percent:.1f} %" if 0 < percent < 10 else f"{percent:.0f} %"


def moment(ts_ms: int) -> str:
    """A time of day with its date, in UTC; "-" for none."""
    if not ts_ms:
        return "-"
    when = datetime.fromtimestamp(ts_ms / 1000, UTC)
    return when.strftime("%Y-%m-%d %H:%M:%S.") + f"{ts_ms % 1000:03d}Z"


def clock(ts_ms: int) -> str:
    """A time of day to the millisecond."""
    return moment(ts_ms)[11:] if ts_ms else "-"


def ago(ts_ms: int, now_ms: int) -> str:
    """How long ago."""
    if not ts_ms:
        return "-"
    delta = now_ms - ts_ms
    return f"in {duration(-delta)}" if delta < -999 else f"{duration(max(delta, 0))} ago"
