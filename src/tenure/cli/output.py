"""Data on stdout, notes on stderr; colour only on a terminal, and not where NO_COLOR is set.

Much of what is shown is text of strangers: ids, names, payloads, errors. What a terminal would obey
or reorder in it (control characters, bidirectional marks) is shown escaped; only colours of
`paint` reach a terminal, which a mark that nobody can guess tells from others.
"""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tenure.cli.config import colours_wanted
from tenure.core.encoding import OBEYED, escaped, one_line

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


_MARK = f"\x1b{secrets.token_hex(8)}"
_UNSAFE = re.compile(rf"[{OBEYED}]|\x1b(?!{_MARK[1:]})")
_PAINTED = re.compile(r"\x1b\[[0-9]+m")


def emit(value: Any, stream: Any = None) -> None:
    """One JSON object, one line, on stdout."""
    import msgspec

    stream = stream or sys.stdout
    text = msgspec.json.encode(value).decode()  # within it, such characters stand in strings only
    stream.write(_UNSAFE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")
    stream.flush()


def emit_text(text: str) -> None:
    """A line for people, on stdout."""
    sys.stdout.write(shown(text) + "\n")
    sys.stdout.flush()


def note(text: str) -> None:
    """A line about what is going on, on stderr."""
    sys.stderr.write(shown(text) + "\n")
    sys.stderr.flush()


def shown(text: str) -> str:
    """Text that is safe for a terminal, and our own colours.

    >>> shown("a\\x1b[2Jb\\u202ec")
    'a\\\\x1b[2Jb\\\\u202ec'
    """
    return _UNSAFE.sub(escaped, text).replace(_MARK, "\x1b")


def paint(text: str, colour: str, stream: Any = None) -> str:
    """The text in a colour, where colours are wanted."""
    if colour not in _COLOURS or not colours_wanted(stream or sys.stdout):
        return text
    return f"{_MARK}[{_COLOURS[colour]}m{text}{_MARK}[0m"


def paint_state(state: str) -> str:
    """A state word in the colour of its meaning."""
    return paint(state, _STATE_COLOURS.get(state, ""))


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns, aligned by what is visible; the last one is not padded."""
    lines = [list(headers), *(list(map(one_line, row)) for row in rows)]
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
    return len(_PAINTED.sub("", shown(text)))
