"""What of a handler's values every store can hold: JSON of finite numbers and whole characters.

Half a surrogate pair is no UTF-8 and becomes U+FFFD, and so does NUL where the store refuses it.
NaN, Infinity, values nested too deeply and objects that are not JSON cannot be stored at all.
Checks that cost time are made only for values that may need them.
"""

from __future__ import annotations

import re
import sys
from typing import Any

import msgspec

JSON_DEPTH_MAX = 100
TAKEN_DEPTH_MAX = 128
"""How deep the JSON of a request may be: more than a handler may return, since it stands in it."""
REPLACED = "characters that the store cannot hold were replaced by U+FFFD"

_TOO_DEEP = f"it is nested deeper than {JSON_DEPTH_MAX} levels"
_encode = msgspec.json.Encoder().encode
_SHAPE = b'[]{}"'
_NOT_SHAPE = bytes(byte for byte in range(256) if byte not in _SHAPE)
_STRING = re.compile(rb'"[^"]*"')
_INNERMOST = re.compile(rb"\[\]|\{\}")
_NUL = re.compile(rb"(?<!\\)((?:\\\\)*)\\u0000")


def to_json(value: Any) -> tuple[bytes, bool]:
    """The value as JSON, and whether characters had to be replaced.

    Raises TypeError, ValueError or OverflowError for what cannot be stored.

    >>> to_json({"a": [1, None]})
    (b'{"a":[1,null]}', False)
    """
    replaced = False
    try:
        try:
            body = _encode(value)
        except UnicodeEncodeError:
            body, replaced = _encode(_mended(_plain(value))), True
        if b"null" in body:  # None, or a number that msgspec writes so
            _check_finite(value)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    if len(body) > 2 * JSON_DEPTH_MAX and _too_deep(body):
        raise ValueError(_TOO_DEEP)
    return body, replaced


_FAULTS = {
    "too_deep": f"is nested deeper than {TAKEN_DEPTH_MAX} levels",
    "bad_number": "holds a number that no reader can keep",
}


def json_fault(value: Any, *, number_max: float = sys.float_info.max) -> str:
    """What of decoded JSON some reader cannot take: "too_deep", "nul", "bad_number"; "" if nothing.

    Level by level, without recursion.

    >>> json_fault([1, {"a": 2.5}]), json_fault([10**400]), json_fault(["a" + chr(0)])
    ('', 'bad_number', 'nul')
    """
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item)
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, str):
                if "\0" in item:
                    return "nul"
            elif isinstance(item, int | float) and abs(item) >= number_max:
                return "bad_number"
        if any(isinstance(item, dict | list) for item in level):
            depth += 1
        if depth > TAKEN_DEPTH_MAX:
            return "too_deep"
        level = below
    return ""


def check_json(raw: bytes | str) -> None:
    """Raise ValueError for a payload that is no JSON, or such that some reader cannot take it."""
    try:
        fault = json_fault(msgspec.json.decode(raw))
    except RecursionError:
        fault = "too_deep"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"is not JSON ({error})") from None
    if fault in _FAULTS:  # some stores hold NUL, and the others say so
        raise ValueError(_FAULTS[fault])


def whole_text(text: str) -> str:
    """The text without halves of surrogate pairs.

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


def _plain(value: Any) -> Any:
    return msgspec.to_builtins(value, str_keys=True, enc_hook=_decoded)


def _decoded(value: Any) -> Any:
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    raise TypeError(f"{type(value).__name__} is not JSON")


def _mended(value: Any) -> Any:
    if isinstance(value, str):
        return whole_text(value)
    if isinstance(value, dict):
        return {_mended(key): _mended(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_mended(each) for each in value]
    return value


def _check_finite(value: Any) -> None:
    import json  # it takes longer to load than a command that never needs it has to do

    try:
        json.dumps(_plain(value), allow_nan=False)
    except ValueError:
        raise ValueError("NaN and Infinity are not JSON") from None


def _too_deep(body: bytes) -> bool:
    """Takes away the innermost brackets, level by level."""
    if body.count(b"[") + body.count(b"{") <= JSON_DEPTH_MAX:
        return False
    bare = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NOT_SHAPE)
    bare = _STRING.sub(b"", bare)
    for _ in range(JSON_DEPTH_MAX):
        bare = _INNERMOST.sub(b"", bare)
        if not bare:
            return False
    return True
