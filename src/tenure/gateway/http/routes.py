"""The routes of the gateway in FastAPI's terms.

A `GatewayRoute` serves all methods of one path. It takes nothing but the request, so FastAPI runs
the dependencies of the application that includes it and leaves the body to us. An `Operation`
describes one method in the API document and serves nothing. Both are in the same router, so prefix,
tags and security of an inclusion apply to both.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from inspect import Parameter, Signature
from typing import Annotated, Any
from urllib.parse import quote

import msgspec
from fastapi import Body, Security
from fastapi.routing import APIRoute
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from tenure.core.endpoint import Endpoint, Reply, Right
from tenure.core.errors import UsageError
from tenure.dashboard.api import BASE, ROUTE
from tenure.gateway.http.connections import ADMIN
from tenure.gateway.http.guard import Guard
from tenure.gateway.http.schemas import model_of
from tenure.gateway.problems import CODES, Problem, ProblemDocument, title_of

JSON = "application/json"
PROBLEM = "application/problem+json"
STREAM = "text/event-stream"
_EVERYWHERE = (405, 500)
_WITH_SCOPE = (401, 403, 429, 503)
_RETRY = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}
_PATH_PARAMETERS = {
    "job_id": "The job's id: a UUID, or up to 128 letters, digits and _ . : @ -",
    "queue": "The queue's name, as in GET /api/queues.",
    "bulk_id": "The id of an action on many jobs, as POST /api/bulk answered it.",
}
_KEYS = [
    Security(HTTPBearer(scheme_name="bearer", auto_error=False)),
    Security(APIKeyHeader(name="X-API-Key", scheme_name="apiKey", auto_error=False)),
]
_RIGHTS_PAGE = """# The right that each route asks for

Made by `tenure api rights` from what the routes declare, which is what the gateway enforces.
[What the words mean](http.md#rights).

| route | scope | whose | changes | audit log | |
|---|---|---|---|---|---|
"""
_AUDIT = {"call": "always", "handler": "always"}


class GatewayRoute(APIRoute):
    """One path of the gateway: an endpoint's resource, or a page.

    `rights` has the right of each method. `raw` is an ASGI application that answers without
    FastAPI, where no dependency has to run first. `admin_only` routes exist only at the admin
    address.
    """

    def __init__(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        *,
        guard: Guard,
        rights: Mapping[str, Right],
        raw: ASGIApp | None = None,
        admin_only: bool = False,
    ) -> None:
        methods = [*rights, *(["HEAD"] if "GET" in rights else [])]
        super().__init__(path, endpoint, methods=methods, include_in_schema=False)
        self.rights = dict(rights)
        self.raw = raw
        self.admin_only = admin_only
        self._guard = guard
        if raw is not None:
            self.app = raw

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if self.admin_only and ADMIN not in scope:
            return Match.NONE, {}
        return super().matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self.path
        own = self.path_format.format_map(scope["path_params"])
        base = scope.get("root_path", "").rstrip("/") + get_route_path(scope).removesuffix(own)
        scope[BASE] = quote(base) if base else ""
        await self._guard(self._serve, scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in (self.methods or ()):
            raise Problem("method", headers=(("allow", ", ".join(sorted(self.methods or ()))),))
        await super().handle(scope, receive, send)


class _Raw(Response):
    """A response that an ASGI application sends."""

    def __init__(self, app: ASGIApp, request: Request) -> None:
        self._app = app
        self._request = request
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, replayed(self._request), send)


def replayed(request: Request) -> Receive:
    """The messages of a request, from the first one even if a dependency has read the body."""
    body = getattr(request, "_body", None)
    if body is None:
        return request.receive
    left = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        return left.pop() if left else await request.receive()

    return receive


def resource_route(
    path: str, resource: ASGIApp, guard: Guard, rights: Mapping[str, Right], *, admin_only: bool
) -> GatewayRoute:
    """The route of an ASGI application that answers all methods of a path."""

    async def endpoint(request: Request) -> Response:
        return _Raw(resource, request)

    return GatewayRoute(
        path, endpoint, guard=guard, rights=rights, raw=resource, admin_only=admin_only
    )


class Operation(APIRoute):
    """One method of one path in the API document."""

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
        body = Annotated[model_of(endpoint.takes), Body()]
        parameters.append(Parameter("body", Parameter.KEYWORD_ONLY, annotation=body))
    made: Any = answered
    made.__signature__ = Signature(parameters, return_annotation=_model(reply))
    return answered


def _response_class(media: str) -> type[Response]:
    return JSONResponse if media == JSON else type("Text", (Response,), {"media_type": media})


def _model(reply: Reply) -> Any:
    return model_of(reply.shape) if reply.media == JSON and reply.shape is not None else Response


def _response(reply: Reply) -> dict[str, Any]:
    made = {"description": reply.description, **_also(reply)}
    return made | ({"model": _model(reply)} if _model(reply) is not Response else {})


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


def rights_of(routes: Iterable[BaseRoute]) -> dict[str, Right]:
    """The right of every `METHOD /path`."""
    found: dict[str, Right] = {}
    for route in routes:
        if isinstance(route, GatewayRoute):
            found |= {f"{method} {route.path}": right for method, right in route.rights.items()}
        elif not isinstance(route, Operation):
            raise UsageError(f"{route!r} declares no right; every route names scope and owner")
    return found


def rights_page(rights: Mapping[str, Right]) -> str:
    """The page docs/reference/rights.md."""
    rows = [_row(route, rights[route]) for route in sorted(rights, key=_by_path)]
    return _RIGHTS_PAGE + "\n".join(rows)


def _by_path(route: str) -> tuple[str, ...]:
    method, _, path = route.partition(" ")
    return path, method


def _row(route: str, right: Right) -> str:
    acts = right.does and not route.startswith("GET ")
    cells = (
        f"`{route}`",
        f"`{right.scope}`" if right.scope else "open",
        right.whose,
        right.does if acts else "",
        _AUDIT.get(right.audit, right.audit) if acts else "",
        "streams" if right.streams else "",
    )
    return f"| {' | '.join(cells)} |"
