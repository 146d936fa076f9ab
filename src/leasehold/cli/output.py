"""Data on stdout, talk on stderr; colour only where somebody looks and has not set NO_COLOR."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from leasehold.cli.config import colours_wanted

_COLOURS = {
    "green": "32",
    "red": "31",
    "yellow": "33",
    "blue": "34",
    "dim": "2",
    "bold": "1",
}
_STATE_COLOURS = {
    "done": "green",
    "completed": "green",
    "succeeded": "green",
    "error": "red",
    "failed": "red",
    "dead_letter": "red",
    "running": "blue",
    "active": "blue",
    "canceled": "yellow",
    "cancelled": "yellow",
}


def emit(value: Any) -> None:
    """One JSON object, one line, on stdout."""
    import msgspec

    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def emit_text(text: str) -> None:
    """A line for people, on stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line about what is going on, on stderr."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def paint(text: str, colour: str, stream: Any = None) -> str:
    """The text in a colour, where colours are wanted."""
    if colour not in _COLOURS or not colours_wanted(stream or sys.stdout):
        return text
    return f"\x1b[{_COLOURS[colour]}m{text}\x1b[0m"


def paint_state(state: str) -> str:
    """A state word in the colour of its meaning."""
    return paint(state, _STATE_COLOURS.get(state, ""))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns, aligned by what is visible; the last one is not padded."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(_visible(line[i]) for line in lines) for i in range(len(headers))]
    out = []
    for number, line in enumerate(lines):
        cells = [
            cell + " " * (width - _visible(cell)) for cell, width in zip(line, widths, strict=True)
        ]
        text = "  ".join(cells).rstrip()
        out.append(paint(text, "dim") if number == 0 else text)
    return "\n".join(out)


def ago(ts_ms: int, now_ms: int | None = None) -> str:
    """How long ago, in the largest unit that says enough.

    >>> ago(1_000, 3_500), ago(1_000, 181_000), ago(0)
    ('2s', '3m', '-')
    """
    if not ts_ms:
        return "-"
    seconds = max(0, (now_ms or int(time.time() * 1000)) - ts_ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def _visible(text: str) -> int:
    length, inside = 0, False
    for char in text:
        if char == "\x1b":
            inside = True
        elif inside:
            inside = char != "m"
        else:
            length += 1
    return length
