"""JSON to typed values: msgspec's types, dataclasses, and pydantic models where installed.

The way back is `core.encoding.storable_json`, which takes the same types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import msgspec

from tenure.core.encoding import REPLACED, from_json, storable_json
from tenure.core.errors import InvalidJob

_PLACE = " - at `$"
_NAME_CHARS_MAX = 200
_PROBLEMS_MAX = 100


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """A function that reads JSON as a value of this type; `Any` reads plain values.

    The function raises `msgspec.ValidationError`, which `explain` turns into text. Raises TypeError
    here for a type that cannot be read from JSON.
    """
    if kind is Any or kind is object:
        return from_json
    decode = msgspec.json.Decoder(kind, dec_hook=_from_builtin).decode

    def read(raw: bytes) -> Any:
        try:
            return decode(raw)
        except msgspec.ValidationError:
            raise
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            # JSON that only the standard library reads, such as half a surrogate pair.
            return msgspec.convert(from_json(raw), kind, dec_hook=_from_builtin)

    return read


def payload_of(value: Any, task: str) -> bytes:
    """A value as a payload; raises `InvalidJob` for what is not JSON."""
    try:
        payload, replaced = storable_json(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidJob(f"the payload for task {task!r} is not JSON: {error}") from None
    if replaced:
        raise InvalidJob(f"the payload for task {task!r}: {REPLACED.replace('were', 'would be')}")
    return payload


@lru_cache(maxsize=1_000)
def result_decoder(kind: Any) -> Callable[[bytes], Any]:
    """As `decoder`, kept for the next result of the same type."""
    return decoder(kind)


def explain(error: Exception, known: Iterable[str] = ()) -> str:
    """What is wrong with a value, and where: the field first, then the reason.

    `known` are the fields there are, for a field that is none of them.

    >>> explain(msgspec.ValidationError("Expected `str`, got `int` - at `$.to.name`"))
    'to.name: expected `str`, got `int`'
    >>> explain(msgspec.ValidationError("Object contains unknown field `nmae`"), ["name"])
    'nmae: there is no such field, did you mean `name`? (there are: name)'
    """
    text, _, place = str(error).partition(_PLACE)
    place = place.rstrip("`").lstrip(".")
    if not place and text.startswith("Object contains unknown field `"):
        return _unknown(text.split("`")[1], list(known))
    if text.startswith("Object missing required field `"):
        name = text.split("`")[1]
        return f"{place}.{name}: it is missing" if place else f"{name}: it is missing"
    return f"{place}: {text[:1].lower()}{text[1:]}" if place else text


def _unknown(name: str, known: list[str]) -> str:
    import difflib  # slow to import, and needed for mistakes only

    name = name[:_NAME_CHARS_MAX]  # a submitter chose it, and the search takes its time
    close = difflib.get_close_matches(name, known, n=1)
    hint = f", did you mean `{close[0]}`?" if close else ""
    there = f" (there are: {', '.join(known)})" if known else ""
    return f"{name}: there is no such field{hint}{there}"


def _from_builtin(kind: Any, value: Any) -> Any:
    """A type that msgspec does not know: a pydantic model, or nothing that JSON can become."""
    validate = getattr(kind, "model_validate", None)
    if validate is None:
        if isinstance(kind, type) and isinstance(value, kind):
            return value
        raise TypeError(f"{getattr(kind, '__name__', kind)} cannot be made from JSON")
    try:
        return validate(value)
    except ValueError as error:
        raise ValueError(_pydantic_text(error)) from None


def _pydantic_text(error: Any) -> str:
    """Fields and reasons of a pydantic error, without the values that were given."""
    if not hasattr(error, "errors"):
        return str(error)
    if error.error_count() > _PROBLEMS_MAX:  # pydantic goes on, and a submitter chose how long
        return f"{error.error_count()} values of {error.title} are wrong"
    problems = error.errors(include_url=False, include_input=False, include_context=False)
    parts = []
    for problem in problems:
        place = ".".join(map(str, problem["loc"]))
        parts.append(f"{place}: {problem['msg']}" if place else str(problem["msg"]))
    return "; ".join(parts)
