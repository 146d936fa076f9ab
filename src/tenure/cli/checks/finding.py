"""One thing that was looked at, and what to do about it."""

from __future__ import annotations

from typing import Literal

import msgspec

Level = Literal["ok", "note", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """`problem` will hurt, `note` may; `remedy` is what helps, ready to be done."""

    level: Level
    check: str
    detail: str
    remedy: str = ""


def judged(check: str, detail: str, *, bad: bool, remedy: str, level: Level = "problem") -> Finding:
    """A finding of `level` with its remedy if it is bad, else ok."""
    return Finding(level, check, detail, remedy) if bad else Finding("ok", check, detail)
