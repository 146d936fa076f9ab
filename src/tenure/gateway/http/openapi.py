"""The operations of the API in FastAPI's terms, from which it makes the OpenAPI document.

Requests and responses are read and written by msgspec; the pydantic models of this module only
describe them. FastAPI names a model in the document, so an application that includes the gateway
may use the same names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache, reduce
from inspect import Parameter, Signature
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from fastapi import Body, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from msgspec import Meta, inspect
from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, create_model
from starlette.responses import JSONResponse, Response
from starlette.routing import Match
from starlette.types import Scope

from tenure.core.endpoint import STREAM, Endpoint, Reply
from tenure.core.errors import UsageError
from tenure.gateway.problems import CODES, ProblemDocument, title_of

_PLAIN = (str, int, float, bool, type(None))
JSON = "application/json"
PROBLEM = "application/problem+json"
_EVERYWHERE = (405, 500)
_WITH_SCOPE = (401, 403, 429, 503)
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_PATH_PARAMETERS = {
    "job_id": "The job's id: a UUID, or up to 128 letters, digits and _ . : @ -",
    "queue": "The queue's name, as in GET /api/queues.",
    "bulk_id": "The id of an action on many jobs, as POST /api/bulk answered it.",
    "name": "The schedule's name: up to 100 letters, digits and _ . -",
}
_KEYS = [
    Security(HTTPBearer(scheme_name="bearer", auto_error=False)),
    Security(APIKeyHeader(name="X-API-Key", scheme_name="apiKey", auto_error=False)),
]


class Operation(APIRoute):
    """One method of one path in the API document.

    It serves nothing. It is in the same router as the route that does, so that prefix, tags and
    security of an inclusion apply to it.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        (status, reply), *others = endpoint.replies.items()
        extra: dict[str, Any] = {"parameters": _parameters(endpoint)}
        if endpoint.right.scope:
            extra["x-scope"] = endpoint.right.scope
            extra["security"] = [{}]  # besides the keys: the anonymous local caller
        if endpoint.example is not None:
            content = {JSON: {"example": endpoint.example}}
            extra["requestBody"] = {"content": content}
        responses: dict[int | str, dict[str, Any]] = {status: _also(reply)}
        responses |= {each: _response(other) for each, other in others}
        for each in _problem_statuses(endpoint):
            responses.setdefault(each, _problem(each))
        super().__init__(
            endpoint.path,
            _signed(endpoint, reply),
            methods=[endpoint.method],
            operation_id=endpoint.operation,
            name=endpoint.operation,
            summary=endpoint.summary,
            description=endpoint.description,
            tags=[endpoint.tag],
            dependencies=_KEYS if endpoint.right.scope else [],
            status_code=status,
            response_description=reply.description,
            response_class=_response_class(reply.media),
            responses=responses,
            openapi_extra=extra,
        )

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        return Match.NONE, {}


def _signed(endpoint: Endpoint, reply: Reply) -> Callable[..., Any]:
    """A function from the body to the response of an endpoint; it is never called."""

    def answered() -> Any:
        return None

    parameters = []
    if endpoint.takes is not None:
        body: Any = Annotated[model_of(endpoint.takes), Body()]
        parameters.append(Parameter("body", Parameter.KEYWORD_ONLY, annotation=body))
    made: Any = answered
    made.__signature__ = Signature(parameters, return_annotation=_returned(reply))
    return answered


def _response_class(media: str) -> type[Response]:
    return JSONResponse if media == JSON else type("Text", (Response,), {"media_type": media})


def _returned(reply: Reply) -> Any:
    return model_of(reply.shape) if reply.media == JSON and reply.shape is not None else Response


def _response(reply: Reply) -> dict[str, Any]:
    made = {"description": reply.description, **_also(reply)}
    return made | ({"model": _returned(reply)} if _returned(reply) is not Response else {})


def _also(reply: Reply) -> dict[str, Any]:
    """Headers, further media types and events of a reply."""
    made: dict[str, Any] = {}
    if reply.also:
        made["content"] = {media: {"schema": {"type": "string"}} for media in reply.also}
    if reply.media == STREAM:
        # A stream is text to OpenAPI before 3.2, which has no schema of events.
        made["model"] = model_of(reply.shape)
        made["content"] = _Filed(STREAM, **{STREAM: _Filed("x-event-data")})
    if reply.headers:
        made["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in reply.headers.items()
        }
    return made


class _Filed(dict[str, Any]):
    """Content of a response. What FastAPI adds to it is filed under `place`.

    FastAPI would file the model of every response under the media type of the successful one.
    """

    def __init__(self, place: str, **given: Any) -> None:
        super().__init__(given)
        self._place = place

    def setdefault(self, key: str, default: Any = None) -> Any:
        return super().setdefault(self._place, default)


def _problem_statuses(endpoint: Endpoint) -> list[int]:
    usual = (*_EVERYWHERE, *(_WITH_SCOPE if endpoint.right.scope else ()))
    usual += (400,) if endpoint.asks is not None else ()
    return sorted({*endpoint.problems, *usual})


def _problem(status: int) -> dict[str, Any]:
    codes = [code for code, (its, _) in CODES.items() if its == status]
    made: dict[str, Any] = {
        "description": f"{title_of(status)}: code {' or '.join(codes)}.",
        "model": model_of(ProblemDocument),
        "content": _Filed(PROBLEM),
    }
    if status in (429, 503):
        made["headers"] = _RETRY
    return made


def _parameters(endpoint: Endpoint) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _PATH_PARAMETERS[name],
            "schema": {"type": "string"},
        }
        for name in re.findall(r"{(\w+)}", endpoint.path)
    ]
    for name, kind in endpoint.reads.items():
        made.append(_parameter(name, "header", msgspec.json.schema(kind)))
    if endpoint.asks is not None:
        _, schemas = msgspec.json.schema_components([endpoint.asks])
        properties: Mapping[str, Any] = schemas[endpoint.asks.__name__]["properties"]
        made += [_parameter(name, "query", schema) for name, schema in properties.items()]
    return made


def _parameter(name: str, place: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    text = schema.get("description", "")
    return {"name": name, "in": place, "description": text, "schema": schema}


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
