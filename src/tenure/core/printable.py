"""Text of strangers, shown so that a terminal neither obeys nor reorders it."""

from __future__ import annotations

import re

OBEYED = (
    r"\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
)
"""A class of characters for `re`: control characters but tab, line feed and ESC, and bidi marks."""

_UNSAFE = re.compile(rf"[{OBEYED}\x1b]")
_BREAKS = re.compile(r"[\t\n]")


def printable(text: str) -> str:
    """The text with its control characters and bidirectional marks escaped.

    >>> printable("a\\x1b[2Jb\\u202ec")
    'a\\\\x1b[2Jb\\\\u202ec'
    """
    return _UNSAFE.sub(escaped, text)


def one_line(text: str) -> str:
    """The text in one line: its line breaks and tabs are escaped too."""
    return _BREAKS.sub(escaped, text)


def escaped(match: re.Match[str]) -> str:
    """A character as its escape."""
    return match[0].encode("unicode_escape").decode()
