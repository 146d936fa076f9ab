"""Checks a payload against a JSON schema before it is sent (B-45); a subset of JSON Schema."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tenure.core.errors import InvalidJob

_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}
_FORMATS = {
    "uuid": re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"),
    "uri": re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://\S+"),
}

# The contract's own example.
VIDEO_GENERATION: Mapping[str, Any] = {
    "type": "object",
    "required": ["videoId", "userId", "script"],
    "properties": {
        "videoId": {"type": "string", "format": "uuid"},
        "userId": {"type": "string", "minLength": 1},
        "script": {
            "type": "object",
            "required": ["title", "scenes"],
            "properties": {
                "title": {"type": "string", "minLength": 1},
                "scenes": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["sceneNumber", "duration", "voiceover", "imagePrompt"],
                        "properties": {
                            "sceneNumber": {"type": "integer", "minimum": 1},
                            "duration": {"type": "number", "exclusiveMinimum": 0},
                            "voiceover": {"type": "string"},
                            "imagePrompt": {"type": "string"},
                        },
                    },
                },
            },
        },
        "userImageUrls": {"type": "array", "items": {"type": "string", "format": "uri"}},
    },
}


def check(value: Any, schema: Mapping[str, Any]) -> None:
    """Raise `InvalidJob` with everything that is wrong with the payload, and where."""
    problems = list(_problems(value, schema, "payload"))
    if problems:
        raise InvalidJob("; ".join(problems))


def _problems(value: Any, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    types = schema.get("type", [])
    names: list[str] = [types] if isinstance(types, str) else types
    if names and not any(_is_type(value, name) for name in names):
        expected = " or ".join(f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names)
        yield f"{place} must be {expected}, not {_shown(value)}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{place} must be one of {schema['enum']}, not {_shown(value)}"
    if _is_type(value, "number"):
        yield from _number_problems(value, schema, place)
    elif isinstance(value, str):
        yield from _text_problems(value, schema, place)
    elif isinstance(value, list | tuple):
        if len(value) < schema.get("minItems", 0):
            yield f"{place} must have at least {schema['minItems']} items"
        for at, item in enumerate(value):
            yield from _problems(item, schema.get("items", {}), f"{place}[{at}]")
    elif isinstance(value, dict):
        yield from _object_problems(value, schema, place)


def _number_problems(value: float, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if value < schema.get("minimum", value):
        yield f"{place} must be at least {schema['minimum']}, not {value}"
    if value > schema.get("maximum", value):
        yield f"{place} must be at most {schema['maximum']}, not {value}"
    if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
        yield f"{place} must be more than {schema['exclusiveMinimum']}, not {value}"


def _text_problems(value: str, schema: Mapping[str, Any], place: str) -> Iterator[str]:
    if len(value) < schema.get("minLength", 0):
        yield f"{place} must have at least {schema['minLength']} characters"
    pattern = _FORMATS.get(schema.get("format", ""))
    if pattern is not None and not pattern.fullmatch(value):
        yield f"{place} must be a {schema['format']}, not {_shown(value)}"


def _object_problems(value: dict[str, Any], schema: Mapping[str, Any], place: str) -> Iterator[str]:
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            yield f"{place}.{name} is missing"
    for name, member in value.items():
        if name in known:
            yield from _problems(member, known[name], f"{place}.{name}")
        elif schema.get("additionalProperties") is False:
            yield f"{place}.{name} is not known; there are {', '.join(known)}"


def _is_type(value: Any, name: str) -> bool:
    return isinstance(value, _TYPES[name]) and (name == "boolean") == isinstance(value, bool)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
