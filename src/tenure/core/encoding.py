"""JSON and text from untrusted sources: decoding, encoding, escaping, and frames of event streams.

Every byte of a server-sent event is made here (`sse_frame`, `sse_comment`), because its text may
come from a job.
"""

from __future__ import annotations

import hashlib
import re
import sys
from itertools import accumulate
from typing import Any

import msgspec

CONTROL_CHARS = (
    r"\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
)
"""Characters for a class of `re`: control characters except tab, line feed and ESC; bidi marks."""

TIME_MS_MAX = 253_402_300_799_999
"""The end of the year 9999. No date can show a later time; another program may have stored one."""

_UNSAFE = re.compile(rf"[{CONTROL_CHARS}\x1b]")
_BREAKS = re.compile(r"[\t\n]")
_LINE_ENDS = str.maketrans("\r\n\0", "   ")  # what must not be in a line of a server-sent event


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


_LARGE = 32 * 1024


def as_builtin(value: Any) -> Any:
    """What msgspec cannot encode: a pydantic model as its fields; anything else is a TypeError."""
    dump = getattr(value, "model_dump", None)
    if dump is None or isinstance(value, type):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return dump(mode="json")


encode = msgspec.json.Encoder(enc_hook=as_builtin).encode
_decode = msgspec.json.Decoder().decode
_syntax = msgspec.json.Decoder(msgspec.Raw).decode


def from_json(raw: bytes) -> Any:
    r"""The value; raises `msgspec.DecodeError` for what is not JSON.

    >>> from_json(rb'{"half": "\ud83d"}') == {"half": chr(0xD83D)}
    True
    """
    try:
        return _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        import json  # few payloads need it, and commands start faster without it

        try:
            return json.loads(raw.decode(), parse_constant=_refuse)
        except (ValueError, RecursionError):
            raise msgspec.DecodeError(str(error)) from None


def shown_json(raw: bytes) -> Any:
    r"""The value for answers and pages, which are UTF-8: half a surrogate pair becomes U+FFFD, and
    what is not JSON becomes text under `_raw`.

    >>> shown_json(rb'["\ud83d"]') == [chr(0xFFFD)], shown_json(b"[")
    (True, {'_raw': '['})
    """
    try:
        return _decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    import json

    try:
        text = json.dumps(from_json(raw), ensure_ascii=False)
        return _decode(text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"))
    except (msgspec.DecodeError, RecursionError):
        return {"_raw": raw.decode(errors="replace")}


def answer_json(raw: bytes) -> Any:
    """Like `shown_json`, for a value that is only encoded again: large JSON is not decoded.

    The result has no line breaks, which events require.
    """
    if len(raw) > _LARGE:
        try:
            raw.decode()
            return _syntax(
                msgspec.json.format(raw, indent=-1) if b"\n" in raw or b"\r" in raw else raw
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass
    return shown_json(raw)


def to_json(value: Any) -> bytes:
    r"""The value as JSON; half a surrogate pair is written as JavaScript writes it.

    >>> to_json([chr(0xD83D)])
    b'["\\ud83d"]'
    """
    try:
        return encode(value)
    except UnicodeEncodeError:
        import json

        return json.dumps(plain(value), separators=(",", ":"), allow_nan=False).encode()


def plain(value: Any) -> Any:
    """The value as dicts, lists, strings and numbers."""
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_decoded)


def _decoded(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    return as_builtin(value)


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


JSON_DEPTH_MAX = 100
TAKEN_DEPTH_MAX = 128
"""How deep the JSON of a request may be nested: a request may wrap what a handler returned."""
REPLACED = "characters that the store cannot hold were replaced by U+FFFD"

INTEGER_MAX = 2**63

_TOO_DEEP = f"it is nested deeper than {JSON_DEPTH_MAX} levels"
_NOT_SHAPE = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_CHUNK = 1 << 16
# A number of JSON that may be large. The lookbehind keeps the search linear in the text.
_NUMBER = re.compile(rb"(?<![0-9.eE])[0-9][0-9.eE+-]{3,}")
_DIGITS = bytes.maketrans(b"123456789E", b"000000000e")
# With every digit replaced by 0, a number that no double holds contains one of the first patterns,
# and a number beyond 64 bits one of the second.
_BEYOND_DOUBLE = (b"0e000", b"0e+000", b"0" * 200)
_BEYOND_INT64 = (b"0e00", b"0e+00", b"0" * 19)
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def storable_json(value: Any) -> tuple[bytes, bool]:
    """The value as JSON, and whether characters had to be replaced.

    Raises TypeError, ValueError or OverflowError for what cannot be stored.

    >>> storable_json({"a": [1, None]})
    (b'{"a":[1,null]}', False)
    """
    replaced = False
    try:
        try:
            body = encode(value)
        except UnicodeEncodeError:
            body, replaced = encode(_whole_texts(plain(value))), True
        if b"null" in body:  # None, NaN or Infinity
            _check_finite(value)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if len(body) > 2 * JSON_DEPTH_MAX and _is_deeper(body, JSON_DEPTH_MAX):
        raise ValueError(_TOO_DEEP)
    return body, replaced


_FAULTS = {
    "too_deep": f"is nested deeper than {TAKEN_DEPTH_MAX} levels",
    "bad_number": "holds a number that no reader can keep",
}


def json_fault(raw: bytes, *, number_max: float = sys.float_info.max) -> str:
    r"""Why some reader cannot accept this JSON: "too_deep", "bad_number", "nul"; "" if all can.

    The text is searched, which is many times faster than decoding it and walking the value.

    >>> json_fault(b'[1,{"a":2.5}]'), json_fault(b"[1e400]"), json_fault(rb'["a\u0000"]')
    ('', 'bad_number', 'nul')
    """
    if _is_deeper(raw, TAKEN_DEPTH_MAX):
        return "too_deep"
    digits = raw.translate(_DIGITS)
    short, signed, long = _BEYOND_DOUBLE if number_max > INTEGER_MAX else _BEYOND_INT64
    may_be_beyond = short in digits or signed in digits or long in digits
    if may_be_beyond and _has_beyond(raw, number_max):
        return "bad_number"
    return "nul" if b"\\u0000" in raw and b"\\u0000" in _unescaped(raw) else ""


def check_json(raw: bytes | str) -> None:
    """Raise ValueError for a payload that is not JSON or that some reader cannot accept."""
    try:
        raw = raw.encode() if isinstance(raw, str) else raw
        _syntax(raw)
        raw.decode()
        fault = json_fault(raw)
    except RecursionError:
        fault = "too_deep"
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if fault in _FAULTS:  # NUL is left to the stores: some hold it
        raise ValueError(_FAULTS[fault])


def whole_text(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair.

    >>> whole_text("a" + chr(0xD83D) + "b") == "a" + chr(0xFFFD) + "b"
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def without_nul(body: bytes) -> bytes:
    r"""JSON whose strings hold U+FFFD instead of NUL.

    >>> without_nul(rb'["\u0000", "\\u0000"]').decode()
    '["�", "\\\\u0000"]'
    """
    return _NUL.sub(b"\\1\xef\xbf\xbd", body) if b"\\u0000" in body else body


def _whole_texts(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {_whole_texts(key): _whole_texts(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_texts(each) for each in value]
    return value


def _check_finite(value: Any) -> None:
    import json  # imported here, so that commands start faster

    try:
        json.dumps(plain(value), allow_nan=False)
    except ValueError:
        raise ValueError("NaN and Infinity are not JSON") from None


def _is_deeper(raw: bytes, levels: int) -> bool:
    """Whether JSON is nested deeper, counted from its brackets outside of strings.

    It works in chunks, so that other threads can run in between.
    """
    if raw.count(b"[") + raw.count(b"{") <= levels:
        return False
    bare = _unescaped(raw).translate(_STEPS, _NOT_SHAPE)
    depth = inside = 0
    for at in range(0, len(bare), _CHUNK):
        parts = bare[at : at + _CHUNK].split(b'"')
        steps = b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) & 1
        opened = steps.count(1)
        if depth + opened > levels:
            depths = accumulate(memoryview(steps).cast("b"), initial=depth)
            if max(depths) > levels:
                return True
        depth += 2 * opened - len(steps)
    return False


def _unescaped(raw: bytes) -> bytes:
    """JSON without escaped backslashes and quotes: every quote left begins or ends a string."""
    return raw.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in raw else raw


def _has_beyond(raw: bytes, number_max: float) -> bool:
    """Whether the absolute value of a number outside of strings reaches `number_max`."""
    numbers = _NUMBER.findall(b" ".join(_unescaped(raw).split(b'"')[::2]))
    if max(map(float, numbers), default=0.0) < number_max:
        return False
    return any(_is_beyond(number, number_max) for number in numbers)


def _is_beyond(number: bytes, number_max: float) -> bool:
    if number.isdigit() and len(number) < 400:  # a double would round it
        return int(number) >= number_max
    return float(number) >= number_max


def sse_frame(name: str, data: object, *, event_id: str = "", retry_ms: int | None = None) -> bytes:
    r"""One server-sent event: its name and its data as JSON.

    `event_id` is the position from which a client resumes, `retry_ms` when it shall reconnect.

    >>> sse_frame("tick", {"n": 1}, event_id="7")
    b'id: 7\nevent: tick\ndata: {"n":1}\n\n'
    """
    retry = b"" if retry_ms is None else b"retry: %d\n" % retry_ms
    position = b"id: %b\n" % event_id.encode() if event_id else b""
    event = name.translate(_LINE_ENDS).encode()
    return b"%b%bevent: %b\ndata: %b\n\n" % (retry, position, event, msgspec.json.encode(data))


def sse_comment(text: str, *, retry_ms: int = 0) -> bytes:
    """A comment of an event stream; with `retry_ms` also the time after which to reconnect."""
    retry = b"retry: %d\n" % retry_ms if retry_ms else b""
    return b"%b: %b\n\n" % (retry, text.translate(_LINE_ENDS).encode())


def short_hash(data: bytes) -> str:
    """What the journal keeps of a payload, a result or a token."""
    return hashlib.sha256(data).hexdigest()[:16]
