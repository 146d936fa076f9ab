"""Names whose values are secret, in whichever way they are written."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from urllib.parse import unquote_plus

USUAL = (
    *("password", "passwd", "pwd", "passphrase", "passcode", "secret", "token", "jwt", "api_key"),
    *("authorization", "auth", "bearer", "cookie", "credential", "session", "sid", "dsn"),
    *("private_key", "access_key", "account_key", "signing_key", "encryption_key", "kek", "dek"),
    *("connection_string", "conn_str", "signature", "sig", "otp", "pin", "cvv", "cvc"),
    *("pw", "creds", "ssh_key", "license_key", "hmac_key", "master_key", "client_key"),
)
# A name that ends in `pass`, or whose last part is `key`, is secret too, except these.
_NO_PASS = (
    *("bypass", "compass", "surpass", "trespass", "overpass", "underpass"),
    *("lowpass", "highpass", "bandpass"),
)
_NO_KEY = frozenset(
    (
        *("primary", "foreign", "sort", "partition", "idempotency", "cache", "public", "object"),
        *("s", "routing", "dedup", "dedupe", "deduplication", "group", "row", "shard", "hash"),
        *("range", "index", "unique", "natural", "composite", "storage", "blob", "file", "order"),
        *("ordering", "message", "event", "job", "task", "queue", "record", "item", "entity"),
        *("lookup", "join", "parent", "child", "issue", "project", "search", "lock", "map"),
        *("column", "field", "metric", "feature", "translation", "correlation", "host", "hot"),
    )
)
_SHORT = 4
_NAME_CHARS = 128
_NAME_CHARS_MAX = 1_024
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Characters that are not seen (format characters and variation selectors), and letters of other
# scripts that look like those of ASCII.
_UNSEEN = re.compile(
    "[\u00ad\u034f\u0600-\u0605\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\ufe00-\ufe0f\ufeff\ufff9-\ufffb\U000e0000-\U000e01ef]"
)
_FOREIGN = (
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u0501\u04bb\u043a\u0442\u0432"
    "\u03b1\u03bf\u03c1\u03ba\u03b9"
)
_ASCII = "aeopcyxijsdhktbaopki"
_LOOKALIKES = str.maketrans(_FOREIGN + _FOREIGN.upper(), _ASCII + _ASCII.upper())


class SecretNames:
    """The usual names and `more`; `-name` leaves a usual one out."""

    def __init__(self, more: Iterable[str] = ()) -> None:
        given = list(more)
        dropped = {flat(word[1:]) for word in given if word.startswith("-")}
        named = [word for word in given if word[0] != "-"]
        self._dropped = dropped
        words = [word for word in map(flat, (*USUAL, *named)) if word and word not in dropped]
        self._short = frozenset(word for word in words if len(word) <= _SHORT)
        self._long = re.compile("|".join(re.escape(w) for w in words if len(w) > _SHORT) or "(?!)")
        self._known = lru_cache(maxsize=4096)(self._is_secret)

    def match(self, name: str) -> bool:
        """Whether the value of this name is masked; that of a very long one is, unread."""
        if len(name) > _NAME_CHARS_MAX:
            return True
        return self._known(name) if len(name) <= _NAME_CHARS else self._is_secret(name)

    def _is_secret(self, name: str) -> bool:
        name = written(name)
        word = flat(name)
        if self._long.search(word):
            return True
        parts = [part.lower() for part in _PART.findall(name)]
        if not self._short.isdisjoint((word, *parts)):
            return True
        if word in self._dropped:
            return False
        if word.endswith("pass"):
            return "pass" not in self._dropped and not word.endswith(_NO_PASS)
        # In plain text `missing key: x` is a message.
        is_key = len(parts) > 1 and parts[-1] == "key" and " " not in name
        return is_key and parts[-2] not in _NO_KEY and "key" not in self._dropped


def written(text: str) -> str:
    """A name as it is read: its parts in ASCII as far as possible, and not encoded for a URL."""
    if "%" in text:
        text = unquote_plus(unquote_plus(text))
    if text.isascii():
        return text
    return without_unseen(unicodedata.normalize("NFKC", text)).translate(_LOOKALIKES)


def without_unseen(text: str) -> str:
    """The text without characters that are not seen."""
    return text if text.isascii() else _UNSEEN.sub("", text)


def flat(text: str) -> str:
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.lower())
