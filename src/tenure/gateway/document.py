"""The OpenAPI document, made from the endpoints themselves."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, get_args

import msgspec

from tenure import __version__
from tenure.core.endpoint import Endpoint, Reply
from tenure.core.errors import UsageError
from tenure.gateway.problems import CODES, title_of

_REF = "#/components/schemas/{name}"
_EVERYWHERE = (405, 500)
_WITH_SCOPE = (401, 403, 429, 503)
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_PATH_PARAMETERS = {
    "job_id": "The job's id: a UUID, or up to 128 letters, digits and _ . : @ -",
    "queue": "The queue's name, as in GET /api/queues.",
    "bulk_id": "The id of an action on many jobs, as POST /api/bulk answered it.",
}


class ProblemDocument(msgspec.Struct, frozen=True):
    """An error (RFC 9457). `code` is for programs, `detail` for people."""

    type: str
    title: str
    status: int
    detail: str
    instance: str
    code: str
    request_id: str


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """An OpenAPI 3.1 document of these endpoints."""
    endpoints = list(endpoints)
    types: list[Any] = [ProblemDocument]
    for endpoint in endpoints:
        for shape in (endpoint.takes, *(reply.shape for reply in endpoint.replies.values())):
            types += [one for one in _structs(shape) if one not in types]
    schemas = components(types)
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tenure",
            "version": __version__,
            "summary": "Jobs that are leased, never owned: submit, follow, cancel, steer.",
            "license": {"name": "MIT", "identifier": "MIT"},
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            },
        },
    }


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    made: dict[str, Any] = {
        "operationId": endpoint.operation,
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": _parameters(endpoint),
        "responses": _responses(endpoint),
        # The anonymous local caller needs neither.
        "security": [{"bearer": []}, {"apiKey": []}, {}] if endpoint.right.scope else [],
    }
    if endpoint.description:
        made["description"] = endpoint.description
    if endpoint.right.scope:
        made["x-scope"] = endpoint.right.scope
    if endpoint.takes is not None:
        content: dict[str, Any] = {"schema": _schema(endpoint.takes)}
        if endpoint.example is not None:
            content["example"] = endpoint.example
        made["requestBody"] = {"required": True, "content": {"application/json": content}}
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
    return made + _query_parameters(endpoint.asks)


def _query_parameters(asks: Any) -> list[dict[str, Any]]:
    if asks is None:
        return []
    _, schemas = msgspec.json.schema_components([asks], ref_template=_REF)
    properties: Mapping[str, Any] = schemas[asks.__name__]["properties"]
    return [_parameter(name, "query", schema) for name, schema in properties.items()]


def _parameter(name: str, place: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    text = schema.get("description", "")
    return {"name": name, "in": place, "description": text, "schema": schema}


def _responses(endpoint: Endpoint) -> dict[str, Any]:
    made = {str(status): _reply(reply) for status, reply in endpoint.replies.items()}
    usual = (*_EVERYWHERE, *(_WITH_SCOPE if endpoint.right.scope else ()))
    usual += (400,) if endpoint.asks is not None else ()
    for status in sorted({*endpoint.problems, *usual}):
        made.setdefault(str(status), _problem(status))
    return made


def _reply(reply: Reply) -> dict[str, Any]:
    made: dict[str, Any] = {"description": reply.description}
    if reply.shape is not None:
        # An event stream is text as a whole; its frames are in the AsyncAPI document.
        shape = str if reply.media == "text/event-stream" else reply.shape
        made["content"] = {reply.media: {"schema": _schema(shape)}}
        made["content"] |= {media: {"schema": _schema(str)} for media in reply.also}
    if reply.headers:
        made["headers"] = {
            name: {"description": text, "schema": {"type": "string"}}
            for name, text in reply.headers.items()
        }
    return made


def _problem(status: int) -> dict[str, Any]:
    codes = [code for code, (its, _) in CODES.items() if its == status]
    made: dict[str, Any] = {
        "description": f"{title_of(status)}: code {' or '.join(codes)}.",
        "content": {"application/problem+json": {"schema": _schema(ProblemDocument)}},
    }
    if status in (429, 503):
        made["headers"] = _RETRY
    return made


def _schema(shape: Any) -> dict[str, Any]:
    if shape is str:
        return {"type": "string"}
    refs = [{"$ref": _REF.format(name=one.__name__)} for one in _structs(shape)]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _structs(shape: Any) -> tuple[Any, ...]:
    """The structs that a shape names: itself, or the parts of a union."""
    if shape in (None, str):
        return ()
    return get_args(shape) if isinstance(shape, UnionType) else (shape,)


def components(types: list[Any]) -> dict[str, Any]:
    """Their schemas by name. Two types of one name would be known by neither."""
    _, schemas = msgspec.json.schema_components(types, ref_template=_REF)
    doubled = [name for name in schemas if "." in name]
    if doubled:
        raise UsageError(f"two types of the API have one name, so rename one: {doubled}")
    for schema in schemas.values():
        if "description" in schema:
            schema["description"] = inspect.cleandoc(schema["description"])
    return schemas
