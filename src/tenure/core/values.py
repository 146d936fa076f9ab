"""JSON that other programs stored, as values.

A string may hold half a surrogate pair (`"\\ud800"`): that is JSON by its grammar, and JavaScript
writes it. msgspec refuses it, so what it refuses is read once more by the standard library.
"""

from __future__ import annotations

from typing import Any

import msgspec

_LARGE = 32 * 1024
encode = msgspec.json.Encoder().encode
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
        import json  # few payloads need it, and commands that only look shall start fast

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
    """As `shown_json`, for what is only encoded again: large JSON is not decoded for that.

    It stays without line breaks, as events need it.
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
    raise TypeError(f"{type(value).__name__} is not JSON")


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")
