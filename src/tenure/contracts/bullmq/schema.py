"""Checks a payload against a JSON schema before it is sent: the part of it that payloads use.

`VIDEO_GENERATION` is the contract's own example. Errors name the place and what would be right.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
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
    """Raise `InvalidJob` that lists everything wrong with the payload."""
    problems = list(_problems(value, schema, "payload"))
    if problems:
        raise InvalidJob("; ".join(problems))


def _problems(value: Any, schema: Mapping[str, Any], place: str) -> list[str]:
    wanted = schema.get("type")
    if wanted is not None and not _is(value, wanted):
        return [f"{place} must be {_article(wanted)}, not {_shown(value)}"]
    found = _bounds(value, schema, place)
    if isinstance(value, dict):
        found += _members(value, schema, place)
    elif isinstance(value, list | tuple) and "items" in schema:
        for at, item in enumerate(value):
            found += _problems(item, schema["items"], f"{place}[{at}]")
    return found


def _members(value: dict[str, Any], schema: Mapping[str, Any], place: str) -> list[str]:
    known = schema.get("properties", {})
    found = [
        f"{place}.{name} is missing" for name in schema.get("required", ()) if name not in value
    ]
    for name, member in value.items():
        if name in known:
            found += _problems(member, known[name], f"{place}.{name}")
        elif schema.get("additionalProperties") is False:
            found.append(f"{place}.{name} is not known; there are {', '.join(known)}")
    return found


def _bounds(value: Any, schema: Mapping[str, Any], place: str) -> list[str]:
    found = []
    if isinstance(value, int | float) and not isinstance(value, bool):
        if "minimum" in schema and value < schema["minimum"]:
            found.append(f"{place} must be at least {schema['minimum']}, not {value}")
        if "maximum" in schema and value > schema["maximum"]:
            found.append(f"{place} must be at most {schema['maximum']}, not {value}")
        if "exclusiveMinimum" in schema and value <= schema["exclusiveMinimum"]:
            found.append(f"{place} must be more than {schema['exclusiveMinimum']}, not {value}")
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            found.append(f"{place} must have at least {schema['minLength']} characters")
        pattern = _FORMATS.get(schema.get("format", ""))
        if pattern is not None and not pattern.fullmatch(value):
            found.append(f"{place} must be a {schema['format']}, not {_shown(value)}")
    if isinstance(value, list | tuple) and len(value) < schema.get("minItems", 0):
        found.append(f"{place} must have at least {schema['minItems']} items")
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{place} must be one of {schema['enum']}, not {_shown(value)}")
    return found


def _is(value: Any, wanted: str | list[str]) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted
    is_bool = isinstance(value, bool)
    return any(
        isinstance(value, _TYPES[name]) and (not is_bool or name == "boolean") for name in names
    )


def _article(wanted: str | list[str]) -> str:
    names = [wanted] if isinstance(wanted, str) else wanted
    return " or ".join(f"{'an' if name[0] in 'aeiou' else 'a'} {name}" for name in names)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
