"""Masks the secrets in jobs for everyone but the requester of the job.

A JSON value is masked by its name, at any depth, also in JSON within strings. In other text a value
is masked by the name before it (`password=...`, `Authorization: ...`), by its place in a URL (the
password, and query parameters with secret names), or because it looks like a usual credential.
Stored data that should be JSON and is not is masked whole. Every step is linear in the text. Text
longer than `_TEXT_MAX`, JSON larger than `_RAW_MAX` and values in more than `_DEEP` encodings are
masked whole. Large jobs are masked in a thread, to keep the event loop free.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import unquote_plus

import msgspec

from tenure.core.encoding import from_json, to_json
from tenure.core.endpoint import Caller, Refused
from tenure.core.errors import UsageError
from tenure.core.job import JobEvent, JobRecord

MASK = "•••"
_T = TypeVar("_T")
_End: TypeAlias = Callable[[str, int, str], int]
_TEXT_MAX = 64 * 1024
_RAW_MAX = 256 * 1024
_DEEP = 3
_LARGE = 32 * 1024
_WAITING_MAX = 64
_NAMES = ("name", "key", "header", "field", "k", "option", "parameter", "variable", "property")
_VALUES = ("value", "values", "content", "v", "val", "default", "data", "text")
# A letter, digit or mark of a name; a quote would change where values end.
_ESCAPED = re.compile(r"(?<!\\)\\++u00(2[DdEe]|3[0-9]|[46][1-9A-Fa-f]|5[0-9AaFf]|7[0-9Aa])")
_WORD = re.compile(r"[^\s\"'<>]+")
_SCHEME = re.compile(r"(:(?:\\*/){2})")  # JSON may have escaped the slashes
_PARAMETER = re.compile(r"([?&;#])([^=&;#?]+)=([^&;#]*)")
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")
_SERVER = re.compile(r"\w+\(|[\w.\-]+(?:/|:\d{2,5}(?!\w))")
_ELEMENT = re.compile(r"<([\w.:\-]++)(?:\s[^<>]*+)?(?<!/)>(?!\s*+(?:</|\Z))")
_ATTRIBUTE = r"\s++([\w.:\-]++)\s*+=\s*+(\"[^\"]*+\"|'[^']*+')"
_TAG = re.compile(rf"<[\w.:\-]++(?:{_ATTRIBUTE})++")
_ATTRIBUTES = re.compile(_ATTRIBUTE)
_USER_OPTION = re.compile(
    r"(?<!\S)(-u|--user|--proxy-user)(=|\s{1,4})([\"']?)(?!\d+:\d+\b|\w+:/)([^\s:\"']{1,128}):[^\s\"']+"
)
_USER_OPTIONS = ("-u", "--user", "--proxy-user")
_OPTION = re.compile(r"(?<![\w.\-])--?([\w.\-]++)\s{1,4}(?=[^\s\-])")
# The lookbehinds let a match begin only where a word does: without them long words cost n * n.
_ASSIGNED = re.compile(
    r"(?<![\w.\-%])([\w.\-%]++(?: [\w.\-%]++)?)(?:\\*[\"'])?\s{0,4}(?::=|={1,2}>?|:)"
    r"\s{0,4}(?=[^\s:=])"
)
_ESCAPED_QUOTE = re.compile(r"\\+[\"']")
_QUOTED = re.compile(r"\"(?:[^\"\\]|\\.)*\"?|'(?:[^'\\]|\\.)*'?", re.DOTALL)
_UNQUOTED = re.compile(r"\S+")
_PHRASE = re.compile(r"\S*[^\s,;](?:[^\r\n,;\"']*)|\S+")
_HEADER_LINE = re.compile(r"[^\r\n\"']+")
_CLASS = re.compile(r"\w+(?:Error|Exception)")  # a message follows its colon
_HEADER = re.compile("authorization|cookie")
_CREDENTIAL = re.compile(
    r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?"
    r"(?:-----END [A-Z ]*PRIVATE KEY[A-Z ]*-----|\Z)"
    r"|(?i:\bbearer)\s{1,4}[\w.~+/=\-]{6,}|(?i:\bbasic)\s{1,4}(?=[A-Za-z]*[\d+/=])[\w+/=\-]{6,}"
    r"|(?<![\w\-])(?:(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{12,}|eyJ[\w\-]{8,}\.[\w\-]{8,}[\w.\-]*"
    r"|gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w\-]{16,}|xox[abeprs]-[\w\-]{10,}"
    r"|[srp]k_(?:live|test)_\w{10,}|sk-[\w\-]{20,}|AIza[\w\-]{30,}|tn_\w{8,}"
    r"|(?:hf|npm|dop_v1)_\w{20,}|(?:SG|ya29|hvs)\.[\w.\-]{20,}|pypi-[\w\-]{20,}"
    r"|hooks\.slack\.com/(?:services|workflows)/\S+)",
    re.DOTALL,
)


class _Thread:
    """One thread for large jobs: more would only contend with the event loop."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "redaction")
        self._waiting = 0

    async def run(self, mask: Callable[[], _T], *, may_wait: bool) -> _T:
        if self._waiting >= _WAITING_MAX and not may_wait:
            raise Refused("busy", f"{_WAITING_MAX} large jobs wait to be masked: try again")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, mask)
        finally:
            self._waiting -= 1


_THREAD = _Thread()


class Redaction:
    """Masks secrets. `more` adds names to the usual ones; `-name` removes a usual one.

    `/expression/` masks what the regular expression finds in any text. A name of up to four letters
    must be a whole part of a key (`pin` matches `card_pin`, not `shipping`), a longer one matches
    anywhere in a key; case, `-` and `_` do not matter. A key that ends in `pass` is secret, and one
    that ends in `_key` or `Key`, unless the word before it is known to be harmless.
    """

    def __init__(self, more: Iterable[str] = ()) -> None:
        given = [word.strip() for word in more if word.strip()]
        patterns = [word[1:-1] for word in given if len(word) > 2 and word[0] == word[-1] == "/"]
        self.is_secret = SecretNames(word for word in given if word[0] != "/").match
        try:
            self._patterns = [re.compile(pattern) for pattern in patterns]
        except re.error as error:
            raise UsageError(
                f"gateway.redact: {error.pattern!r} is no expression: {error}"
            ) from None

    async def in_thread_if_large(
        self, chars: int, mask: Callable[[], _T], *, may_wait: bool = False
    ) -> _T:
        """Run a function that masks `chars` characters, in the thread if they are many.

        Raises `Refused` if too many calls wait for the thread, unless `may_wait`, which is for the
        few readers of the gateway itself.
        """
        if chars <= _LARGE:
            return mask()
        return await _THREAD.run(mask, may_wait=may_wait)

    async def shown(self, job: JobRecord, caller: Caller) -> JobRecord:
        """A job as this caller may see it: unmasked for its requester."""
        return job if caller.owns(job.requester) else await self.seen(job)

    async def seen(self, job: JobRecord) -> JobRecord:
        """Like `record`, in the thread if the job is large."""
        return await self.in_thread_if_large(size_of(job), partial(self.record, job))

    async def events(self, events: list[JobEvent], *, may_wait: bool = False) -> list[JobEvent]:
        """Events, masked for callers who did not submit the job."""
        chars = sum(_searched_chars(event.data) for event in events)
        return await self.in_thread_if_large(
            chars, lambda: [self.event(event) for event in events], may_wait=may_wait
        )

    def record(self, job: JobRecord) -> JobRecord:
        """A job, masked for callers who did not submit it."""
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
        """An event, masked for callers who did not submit the job."""
        return msgspec.structs.replace(event, data=self.raw(event.data))

    def raw(self, raw: bytes) -> bytes:
        """Stored JSON, masked; JSON that cannot be parsed or is very large becomes the mask."""
        if not raw:
            return raw
        if len(raw) > _RAW_MAX:
            return to_json(MASK)
        try:
            return to_json(self.masked(from_json(raw)))
        except (msgspec.MsgspecError, RecursionError, ValueError):
            return to_json(MASK)

    def error(self, raw: bytes) -> bytes:
        """A stored error, masked. It may be plain text: some contracts store the message alone."""
        if len(raw) > _RAW_MAX:
            return to_json(MASK)
        try:
            from_json(raw)
        except msgspec.DecodeError:
            return to_json(self.text(raw.decode(errors="replace"))) if raw else raw
        return self.raw(raw)

    def masked(self, value: Any, deep: int = _DEEP) -> Any:
        """A copy of the value with secrets masked, at any depth.

        `deep` is how many more encodings (JSON or parameters within a string) are decoded.
        """
        if isinstance(value, str):
            return self.text(value, deep)
        if isinstance(value, dict):
            return self._object(value, deep)
        if isinstance(value, list):
            if len(value) == 2 and isinstance(value[0], str) and self.is_secret(value[0]):
                return [value[0], _hidden(value[1])]  # a header as a pair
            return self._list(value, deep)
        return value

    def _list(self, value: list[Any], deep: int) -> list[Any]:
        masked, before = [], ""
        for inner in value:
            if before[:1] == "-" and "=" not in before and self.is_secret(before):
                masked.append(_hidden(inner))  # ["--password", ...]
            elif before in _USER_OPTIONS and isinstance(inner, str) and ":" in inner:
                masked.append(f"{inner.partition(':')[0]}:{MASK}")
            else:
                masked.append(self.masked(inner, deep))
            before = inner if isinstance(inner, str) else ""
        return masked

    def _object(self, value: dict[str, Any], deep: int) -> dict[str, Any]:
        names = [inner for key, inner in value.items() if key.lower() in _NAMES]
        # Such as {"name": "Authorization", "value": ...}.
        named = any(isinstance(name, str) and self.is_secret(name) for name in names)
        return {
            self.text(key, deep): _hidden(inner)
            if self.is_secret(key) or (named and key.lower() in _VALUES)
            else self.masked(inner, deep)
            for key, inner in value.items()
        }

    def text(self, text: str, deep: int = _DEEP) -> str:
        """A string with the secrets in it masked."""
        if len(text) < 4:
            return text
        if len(text) > _TEXT_MAX:
            return MASK
        try:
            return self._text(text, deep)
        except RecursionError:
            return MASK

    def _text(self, text: str, deep: int) -> str:
        if text.lstrip()[:1] in ("{", "[", '"'):
            try:
                inner = from_json(text.encode(errors="surrogatepass"))
            except (msgspec.DecodeError, UnicodeError):
                pass
            else:
                masked = self.masked(inner, deep - 1) if deep else MASK
                if masked != inner:
                    return to_json(masked).decode() if deep else MASK
        plain = without_invisible(text)
        if "\\u00" in plain:
            plain = _ESCAPED.sub(lambda found: chr(int(found[1], 16)), plain)
        masked = self._plain(plain, deep)
        text = text if masked == plain else masked
        for pattern in self._patterns:
            text = pattern.sub(MASK, text)
        return text

    def _plain(self, text: str, deep: int) -> str:
        if "@" in text or _SCHEME.search(text):
            text = _WORD.sub(lambda found: self._url(found[0], deep), text)
        if "<" in text:
            text = self._assigned(_TAG.sub(self._tag, text), _ELEMENT, _element_end)
        if "-" in text:
            text = _USER_OPTION.sub(rf"\1\2\3\4:{MASK}", text)
            text = self._assigned(text, _OPTION)
        if ":" in text or "=" in text:
            text = self._assigned(text, _ASSIGNED)
        return _CREDENTIAL.sub(MASK, text)

    def _url(self, word: str, deep: int) -> str:
        """A word without the logins of the URLs in it, nor the values of secret parameters."""
        first, *rest = _SCHEME.split(word)
        if not rest:
            return _without_schemeless_login(word)
        rest[1::2] = map(_without_login, rest[1::2])
        return _PARAMETER.sub(lambda found: self._parameter(found, deep), first + "".join(rest))

    def _parameter(self, found: re.Match[str], deep: int) -> str:
        mark, name, value = found.groups()
        if self.is_secret(name) or written(name).lower() == "key":
            return f"{mark}{name}={MASK}"
        if "%" in value:
            plain = unquote_plus(unquote_plus(value))
            # Values that are encoded more than twice are masked.
            if not deep or _ENCODED.search(plain) or self.text(plain, deep - 1) != plain:
                return f"{mark}{name}={MASK}"
        return found[0]

    def _tag(self, found: re.Match[str]) -> str:
        """The start of an XML tag, masked where it is like `<add key="password" value="..."`."""
        pairs = _ATTRIBUTES.findall(found[0])
        if not any(name.lower() in _NAMES and self.is_secret(value[1:-1]) for name, value in pairs):
            return found[0]
        return _ATTRIBUTES.sub(
            lambda each: f' {each[1]}="{MASK}"' if each[1].lower() in _VALUES else each[0], found[0]
        )

    def _assigned(self, text: str, expression: re.Pattern[str], end: _End | None = None) -> str:
        """The text with a mask for each value whose secret name the expression finds."""
        parts, at = [], 0
        while found := expression.search(text, at):
            parts.append(text[at : found.end()])
            at = found.end()
            name = found[1]
            if self.is_secret(name) and not _CLASS.fullmatch(name):
                parts.append(MASK)
                at = (end or _value_end)(text, at, name)
        return "".join((*parts, text[at:]))

    def restored(self, edited: Any, original: Any) -> Any:
        """An edited value in which every mask that was not edited is the original value again."""
        if edited == self.masked(original):
            return original
        if isinstance(edited, dict):
            known = original if isinstance(original, dict) else {}
            # A value with a harmless name may be masked because of its siblings.
            shown = self.masked(known)
            kept = edited.keys() == shown.keys() and all(
                inner in (MASK, shown[key]) for key, inner in edited.items()
            )
            return {
                key: known[key]
                if inner == MASK and key in known and (kept or self.is_secret(key))
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
                f"the payload still has {MASK} in a text or object that was edited: write the "
                "value itself, or leave the text or object as it was"
            )
        return edited


def _hidden(value: Any) -> Any:
    """The mask; None, "" and booleans are no secrets and stay."""
    return value if value is None or value == "" or isinstance(value, bool) else MASK


def size_of(job: JobRecord) -> int:
    """How many characters of a job are to be masked; of `extra` only the texts count."""
    contents = (job.payload, job.result, job.error, job.progress, *job.extra.values())
    return sum(_searched_chars(each) for each in contents if isinstance(each, bytes | str))


def _searched_chars(raw: bytes | str) -> int:
    """How many characters are searched: none of a value that is masked whole."""
    return len(raw) if len(raw) <= _RAW_MAX else 0


def without_contents(job: JobRecord) -> JobRecord:
    """A job as lists show it: without contents, so that only its error is to be masked."""
    return msgspec.structs.replace(job, payload=b"", result=b"", progress=b"", extra={})


def _without_login(rest: str) -> str:
    """The part after `://` without a password; a user without one may be a token and is masked."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    # A password may contain an unescaped slash: then the last @ is in what looks like the path.
    whole = rest if ":" in authority else authority
    login, at, host = whole.rpartition("@")
    user, colon, _ = login.partition(":")
    return f"{user if colon else ''}{colon}{MASK}@{host}{rest[len(whole) :]}" if at else rest


def _without_schemeless_login(word: str) -> str:
    """`user:password@server` and Oracle's `user/password@server`."""
    login, at, server = word.rpartition("@")
    user, colon, _ = login.partition(":")
    if at and (server.startswith("//") or "jdbc:" in login.lower()):
        user, slash, _ = login.partition("/")
        return f"{user}{slash}{MASK}@{server}" if slash else word
    return f"{user}:{MASK}@{server}" if at and colon and _SERVER.match(server) else word


def _value_end(text: str, at: int, name: str) -> int:
    """Where a value in plain text ends; an object or list ends with the text."""
    if text[at] in "{[":
        return len(text)
    escaped = _ESCAPED_QUOTE.match(text, at)
    if escaped:
        end = text.find(escaped[0], escaped.end())
        return len(text) if end < 0 else end + len(escaped[0])
    header = _HEADER.search(flat(name))
    spaced = text[at - 1] == " " and text[max(at - 5, 0) : at].rstrip()[-1:] == ":"
    unquoted = _PHRASE if spaced else _UNQUOTED
    found = _QUOTED.match(text, at) or (_HEADER_LINE if header else unquoted).match(text, at)
    return found.end() if found else len(text)


def _element_end(text: str, at: int, name: str) -> int:
    """Where an XML element ends; one that is not closed ends with the text."""
    end = text.find(f"</{name}", at)
    return len(text) if end < 0 else end


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
# Invisible characters (format characters and variation selectors), and letters of other scripts
# that look like ASCII letters.
_INVISIBLE = re.compile(
    "[\u00ad\u034f\u0600-\u0605\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f"
    "\ufe00-\ufe0f\ufeff\ufff9-\ufffb\U000e0000-\U000e01ef]"
)
_NOT_ASCII = (
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u0501\u04bb\u043a\u0442\u0432"
    "\u03b1\u03bf\u03c1\u03ba\u03b9"
)
_ASCII = "aeopcyxijsdhktbaopki"
_LOOKALIKES = str.maketrans(_NOT_ASCII + _NOT_ASCII.upper(), _ASCII + _ASCII.upper())


class SecretNames:
    """The usual secret names and `more`; `-name` removes a usual one."""

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
        """Whether the value of this name is masked; a very long name counts as secret."""
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
        # `missing key: x` in plain text is a message.
        is_key = len(parts) > 1 and parts[-1] == "key" and " " not in name
        return is_key and parts[-2] not in _NO_KEY and "key" not in self._dropped


def written(text: str) -> str:
    """A name decoded from URL encoding, with ASCII letters for those that look alike."""
    if "%" in text:
        text = unquote_plus(unquote_plus(text))
    if text.isascii():
        return text
    return without_invisible(unicodedata.normalize("NFKC", text)).translate(_LOOKALIKES)


def without_invisible(text: str) -> str:
    """The text without invisible characters."""
    return text if text.isascii() else _INVISIBLE.sub("", text)


def flat(text: str) -> str:
    """The letters and digits of a name, in lower case."""
    return re.sub(r"[^a-z0-9]", "", text.lower())
