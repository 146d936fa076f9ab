"""What a stored job's JSON fields say, whatever shape their writer gave them."""

from __future__ import annotations

from typing import Any

import msgspec

_CLASS_KEYS = ("code", "type", "class", "name", "error_code")
_MESSAGE_KEYS = ("message", "detail", "reason", "failedReason", "error")
_STACK_KEYS = ("stack", "traceback", "stacktrace")
_CLASS_CHARS_MAX = 80


class Fault(msgspec.Struct, frozen=True):
    """An error taken apart: its class, its words, its traceback."""

    name: str = ""
    message: str = ""
    stack: str = ""


def decoded(raw: bytes) -> Any:
    """The value, None for nothing; text that is no JSON comes back as the text it is."""
    if not raw:
        return None
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw.decode(errors="replace")


def fault_of(raw: bytes) -> Fault:
    """The error of a job; empty for a job that has none."""
    value = decoded(raw)
    if value is None:
        return Fault()
    if not isinstance(value, dict):
        text = str(value)
        return Fault(_class_in(text), text)
    message = _first(value, _MESSAGE_KEYS)
    name = _first(value, _CLASS_KEYS)
    return Fault(name or _class_in(message), message, _first(value, _STACK_KEYS))


def error_class(raw: bytes) -> str:
    """The class of an error, by which dead letters are grouped.

    >>> error_class(b'{"code":"ValueError","message":"no"}'), error_class(b'"Timeout: 3 s"')
    ('ValueError', 'Timeout')
    """
    return fault_of(raw).name


def _first(value: dict[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        found = value.get(key)
        if isinstance(found, list) and found:
            found = "\n".join(map(str, found))
        if found not in (None, "", []):
            return str(found)
    return ""


def _class_in(text: str) -> str:
    """The words before the first colon are the class, if they are short enough to be one."""
    head, colon, _ = text.partition(":")
    head = head.strip().splitlines()[0] if head.strip() else ""
    if colon and len(head) <= _CLASS_CHARS_MAX:
        return head
    return head[:_CLASS_CHARS_MAX]
