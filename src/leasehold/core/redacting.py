"""Secrets in what jobs carry, masked for everyone but the requester of the job.

A value is masked by its name, at any depth and also in JSON within strings; in other text by what
stands before it (`password=...`, `Authorization: ...`), by its place in a URL (the password, and
query parameters with such names), and by the forms of usual credentials. What should be JSON and
is not is masked whole: nothing in it can be told apart. Every step is linear in the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any
from urllib.parse import unquote_plus

import msgspec

from leasehold.core.endpoint import Caller
from leasehold.core.errors import UsageError
from leasehold.core.job import JobEvent, JobRecord
from leasehold.core.values import from_json, to_json

MASK = "•••"
USUAL = (
    *("password", "passwd", "pwd", "passphrase", "passcode", "secret", "token", "jwt", "api_key"),
    *("authorization", "auth", "bearer", "cookie", "credential", "session", "sid", "dsn"),
    *("private_key", "access_key", "account_key", "signing_key", "encryption_key", "kek", "dek"),
    *("connection_string", "conn_str", "signature", "sig", "otp", "pin", "cvv", "cvc"),
)
_SHORT = 4
_NAME_CHARS = 128
_NAMES = ("name", "key", "header", "field")
_VALUES = ("value", "values", "content")
_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_WORD = re.compile(r"[^\s\"'<>]+")
_PARAMETER = re.compile(r"([?&;#])([^=&;#?]+)=([^&;#]*)")
# The lookbehinds let a match begin only where a word does: without them long words cost n * n.
_ASSIGNED = re.compile(
    r"(?<![\w.\-])([\w.\-]++(?: [\w.\-]++)?)(?:\\*[\"'])?\s{0,4}[:=]\s{0,4}(?=[^\s:=])"
)
_ESCAPED_QUOTE = re.compile(r"\\+[\"']")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?", re.DOTALL)
_UNQUOTED = re.compile(r"\S+")
_HEADER_LINE = re.compile(r"[^\r\n\"']+")
_CLASS = re.compile(r"\w+(?:Error|Exception)")  # its colon stands before a message
_HEADER = re.compile("authorization|cookie")
_CREDENTIAL = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
    r"|(?i:\bbearer)\s{1,4}[\w.~+/=\-]{6,}|(?i:\bbasic)\s{1,4}(?=[A-Za-z]*[\d+/=])[\w+/=\-]{6,}"
    r"|(?<![\w\-])(?:(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|eyJ[\w\-]{8,}\.[\w\-]{8,}[\w.\-]*"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|xox[abeprs]-[\w\-]{10,}"
    r"|[srp]k_(?:live|test)_\w{10,}|sk-[\w\-]{20,}|AIza[\w\-]{30,}|lh_\w{8,})",
    re.DOTALL,
)


class Redaction:
    """Masks secrets. `more` are names besides the usual; `-name` leaves a usual one out.

    `/expression/` masks what the regular expression finds in any text. A name of up to four letters
    must be a whole part of a key (`pin` is in `card_pin`, not in `shipping`), a longer one may
    stand anywhere; case, `-` and `_` do not matter.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        given = [word.strip() for word in more if word.strip()]
        dropped = {_flat(word[1:]) for word in given if word.startswith("-")}
        patterns = [word[1:-1] for word in given if len(word) > 2 and word[0] == word[-1] == "/"]
        named = [word for word in given if word[0] not in "-/"]
        words = [word for word in map(_flat, (*USUAL, *named)) if word and word not in dropped]
        self._short = frozenset(word for word in words if len(word) <= _SHORT)
        self._long = re.compile("|".join(re.escape(w) for w in words if len(w) > _SHORT) or "(?!)")
        try:
            self._patterns = [re.compile(pattern) for pattern in patterns]
        except re.error as error:
            raise UsageError(
                f"gateway.redact: {error.pattern!r} is no expression: {error}"
            ) from None
        self._known = lru_cache(maxsize=4096)(self._is_secret)

    def is_secret(self, name: str) -> bool:
        """Whether the value of this name is masked."""
        return self._known(name) if len(name) <= _NAME_CHARS else self._is_secret(name)

    def _is_secret(self, name: str) -> bool:
        flat = _flat(name)
        if self._long.search(flat):
            return True
        return not self._short.isdisjoint((flat, *(part.lower() for part in _PART.findall(name))))

    def shown(self, job: JobRecord, caller: Caller) -> JobRecord:
        """A job as this caller sees it: whole for its requester."""
        return job if caller.owns(job.requester) else self.record(job)

    def record(self, job: JobRecord) -> JobRecord:
        """A job as it is shown to those who did not submit it."""
        return msgspec.structs.replace(
            job,
            payload=self.raw(job.payload),
            result=self.raw(job.result),
            error=self.error(job.error),
            progress=self.raw(job.progress),
            extra={
                name: value if isinstance(value, int) else self.masked({name: value})[name]
                for name, value in job.extra.items()
            },
        )

    def event(self, event: JobEvent) -> JobEvent:
        """An event as it is shown to those who did not submit the job."""
        return msgspec.structs.replace(event, data=self.raw(event.data))

    def raw(self, raw: bytes) -> bytes:
        """Stored JSON, masked; what cannot be parsed becomes the mask."""
        if not raw:
            return raw
        try:
            return to_json(self.masked(from_json(raw)))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return to_json(MASK)

    def error(self, raw: bytes) -> bytes:
        """A stored error, which may be plain text: some contracts store the words alone."""
        try:
            from_json(raw)
        except msgspec.DecodeError:
            return to_json(self.text(raw.decode(errors="replace"))) if raw else raw
        return self.raw(raw)

    def masked(self, value: Any) -> Any:
        """The value with secrets masked, at any depth; the original stays as it is."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return self._object(value)
        if isinstance(value, list):
            if len(value) == 2 and isinstance(value[0], str) and self.is_secret(value[0]):
                return [value[0], _hidden(value[1])]  # a header as a pair
            return [self.masked(inner) for inner in value]
        return value

    def _object(self, value: dict[str, Any]) -> dict[str, Any]:
        named = False  # such as {"name": "Authorization", "value": ...}
        if len(value) <= len(_NAMES) + len(_VALUES):
            names = [inner for key, inner in value.items() if key.lower() in _NAMES]
            named = any(isinstance(name, str) and self.is_secret(name) for name in names)
        return {
            self.text(key): _hidden(inner)
            if self.is_secret(key) or (named and key.lower() in _VALUES)
            else self.masked(inner)
            for key, inner in value.items()
        }

    def text(self, text: str) -> str:
        """A string with the secrets in it masked."""
        try:
            return self._text(text) if len(text) >= _SHORT else text
        except RecursionError:
            return MASK

    def _text(self, text: str) -> str:
        if text.lstrip()[:1] in ("{", "[", '"'):
            try:
                inner = from_json(text.encode(errors="surrogatepass"))
            except (msgspec.DecodeError, UnicodeError):
                pass
            else:
                masked = self.masked(inner)
                if masked != inner:
                    return to_json(masked).decode()
        if "://" in text:
            text = _WORD.sub(lambda found: self._url(found[0]), text)
        if ":" in text or "=" in text:
            text = self._assigned(text)
        text = _CREDENTIAL.sub(MASK, text)
        for pattern in self._patterns:
            text = pattern.sub(MASK, text)
        return text

    def _url(self, word: str) -> str:
        """A word without the logins of the URLs in it, nor the values of secret parameters."""
        scheme, *rest = word.split("://")
        shown = "://".join((scheme, *map(_without_login, rest)))
        return _PARAMETER.sub(self._parameter, shown) if rest else word

    def _parameter(self, found: re.Match[str]) -> str:
        mark, name, value = found.groups()
        plain = unquote_plus(value) if value and "%" in value else ""
        named = unquote_plus(name)
        if self.is_secret(named) or named.lower() == "key" or self.text(plain) != plain:
            return f"{mark}{name}={MASK}"
        return found[0]

    def _assigned(self, text: str) -> str:
        """The text without the values of `name=value` and `name: value` whose names are secret."""
        parts, at = [], 0
        while found := _ASSIGNED.search(text, at):
            parts.append(text[at : found.end()])
            at = found.end()
            name = found[1]
            if self.is_secret(name) and not _CLASS.fullmatch(name):
                parts.append(MASK)
                at = _value_end(text, at, name)
        return "".join((*parts, text[at:]))

    def restored(self, edited: Any, original: Any) -> Any:
        """An edited value in which everything that was masked and left alone is itself again."""
        if edited == self.masked(original):
            return original
        if isinstance(edited, dict):
            known = original if isinstance(original, dict) else {}
            return {
                key: known[key]
                if inner == MASK and key in known
                else self.restored(inner, known.get(key))
                for key, inner in edited.items()
            }
        if isinstance(edited, list):
            others = original if isinstance(original, list) else []
            padded = [*others, *[None] * (len(edited) - len(others))]
            return [
                self.restored(inner, other) for inner, other in zip(edited, padded, strict=False)
            ]
        if isinstance(edited, str) and MASK in edited:
            raise UsageError(
                f"the payload still has {MASK} in a text that was edited: write the value itself, "
                "or leave the text as it was"
            )
        return edited


def _hidden(value: Any) -> Any:
    """The mask, except for what says only that there is no secret, or whether there is one."""
    return value if value is None or value == "" or isinstance(value, bool) else MASK


def _without_login(rest: str) -> str:
    """What follows `://`, without a password; a user alone may be a token, and is masked too."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    _, colon, after = authority.partition(":")
    # A password may hold an unescaped slash: then the last @ is in what looks like the path.
    whole = rest if colon and not after.isdecimal() else authority
    login, at, host = whole.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{user if colon else ''}{colon}{MASK}@{host}{rest[len(whole) :]}" if at else rest


def _value_end(text: str, at: int, name: str) -> int:
    """Where a value in plain text ends; an object or list ends with the text."""
    if text[at] in "{[":
        return len(text)
    escaped = _ESCAPED_QUOTE.match(text, at)
    if escaped:
        end = text.find(escaped[0], escaped.end())
        return len(text) if end < 0 else end + len(escaped[0])
    header = _HEADER.search(_flat(name))
    found = _QUOTED.match(text, at) or (_HEADER_LINE if header else _UNQUOTED).match(text, at)
    return found.end() if found else len(text)


def _flat(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
