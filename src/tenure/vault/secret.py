"""A value that does not show itself, and text from which secrets were taken out."""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable
from typing import Any, NoReturn

HIDDEN = "***"

_URL_SECRETS = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?:[^\s/@'\"<>]*@)?"
    r"(?P<rest>[^\s?'\"<>]*)(?P<query>\?[^\s'\"<>]*)?",
    re.IGNORECASE,
)
_SHORTEST = 6


class Secret:
    """Holds text or bytes; every way of printing it says `***`. `reveal` is the one way out.

    >>> Secret("hunter2"), f"{Secret('hunter2')}"
    (Secret(***), '***')
    """

    __slots__ = ("_value",)

    def __init__(self, value: str | bytes) -> None:
        self._value = value.encode() if isinstance(value, str) else bytes(value)

    def reveal(self) -> bytes:
        """The value itself: for the call that needs it, and no variable that lives on."""
        return self._value

    def text(self) -> str:
        """The value as text."""
        return self._value.decode()

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"

    def __str__(self) -> str:
        return HIDDEN

    def __format__(self, _spec: str) -> str:
        return HIDDEN

    def __bool__(self) -> bool:
        return bool(self._value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._value, other._value)

    def __hash__(self) -> int:
        return hash((Secret, len(self._value)))  # equal ones agree, and nothing leaks by it

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Secret is not pickled: it stays in the process that opened it")


def without_secrets(text: str, secrets: Iterable[Secret] = ()) -> str:
    """Text that may be stored or logged: known secrets, URL queries and user names are hidden.

    >>> without_secrets("GET https://u:p@h.example/a?X-Amz-Signature=abc failed")
    'GET https://h.example/a?*** failed'
    """
    return _URL_SECRETS.sub(_hidden, hide(text, secrets))


def hide(text: str, secrets: Iterable[Secret]) -> str:
    """Text without these secrets."""
    for secret in secrets:
        plain = secret.reveal().decode(errors="replace")
        if len(plain) >= _SHORTEST:  # shorter ones would blank out ordinary words
            text = text.replace(plain, HIDDEN)
    return text


def _hidden(match: re.Match[str]) -> Any:
    return match["scheme"] + match["rest"] + (f"?{HIDDEN}" if match["query"] else "")
