"""The types of the API as pydantic models, from which FastAPI makes the API document.

Requests and responses are read and written by msgspec; these models only describe them. FastAPI
names a model in the document, so an application that includes the gateway may use the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import cache, reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, inspect
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model

from tenure.core.errors import UsageError

_PLAIN = (str, int, float, bool, type(None))


def model_of(kind: Any) -> Any:
    """A type with its objects as models. A part without objects keeps the schema of msgspec."""
    if _is_object(kind):
        return _model(kind)
    if not _has_object(kind):
        return Annotated[Any, WithJsonSchema(_schema(kind))]
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return Annotated[model_of(parts[0]), Field(**_limits(parts[1:]))]
    if origin in (Union, UnionType):
        return reduce(or_, (None if each is type(None) else model_of(each) for each in parts))
    made: Any = origin
    return made[tuple(part if part is ... else model_of(part) for part in parts)]


@cache
def _model(kind: Any) -> type[BaseModel]:
    info: Any = inspect.type_info(kind)
    hints = get_type_hints(kind, include_extras=True)
    # Fields get other names: a field called `schema` would hide a method of the model.
    fields: dict[str, Any] = {
        f"field_{number}": (model_of(hints[field.name]), _field(field))
        for number, field in enumerate(info.fields)
    }
    strict = getattr(info, "forbid_unknown_fields", False)
    made: type[BaseModel] = create_model(
        kind.__name__,
        __config__=ConfigDict(
            extra="forbid" if strict else "ignore",
            json_schema_extra=_without_titles,
        ),
        __doc__=kind.__doc__,
        __module__=kind.__module__,
        **fields,
    )
    return made


def _field(field: inspect.Field) -> Any:
    if field.required:
        return Field(alias=field.encode_name)
    if isinstance(field.default, _PLAIN):
        return Field(default=field.default, alias=field.encode_name)
    return Field(default_factory=dict, alias=field.encode_name)  # the document shows no default


def _without_titles(schema: dict[str, Any]) -> None:
    for each in schema.get("properties", {}).values():
        each.pop("title", None)


def _schema(kind: Any) -> dict[str, Any]:
    made = msgspec.json.schema(kind)
    if "$defs" in made:
        raise UsageError(f"the API document cannot describe {kind!r}; use a struct")
    return made


def _is_object(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, msgspec.Struct) or is_dataclass(kind))


def _has_object(kind: Any) -> bool:
    return _is_object(kind) or any(_has_object(part) for part in get_args(kind))


def _limits(annotations: tuple[Any, ...]) -> Mapping[str, Any]:
    return {
        name: getattr(meta, name)
        for meta in annotations
        if isinstance(meta, Meta)
        for name in ("description", "min_length", "max_length")
        if getattr(meta, name) is not None
    }
