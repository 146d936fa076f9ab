"""The routes of the gateway in FastAPI's terms.

A `GatewayRoute` serves all methods of one path. It takes nothing but the request, so FastAPI runs
the dependencies of the application that includes it and leaves the body to us. What the API
document says of it is in `openapi`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import quote

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from tenure.core.endpoint import Right
from tenure.core.errors import UsageError
from tenure.dashboard.api import BASE, ROUTE
from tenure.gateway.http.connections import ADMIN
from tenure.gateway.http.guard import Guard
from tenure.gateway.problems import Problem

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
        scope[BASE] = self._base(scope)
        await self._guard(self._serve, scope, receive, send)

    def _base(self, scope: Scope) -> str:
        """The prefix of this request: the root path, and the prefix of an inclusion."""
        path, root = scope["path"], scope.get("root_path", "").rstrip("/")
        if path.startswith(root + "/"):  # a proxy may have stripped it
            path = path[len(root) :]
        base: str = root + path.removesuffix(self.path_format.format_map(scope["path_params"]))
        return quote(base) if base else ""

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


def rights_of(routes: Iterable[BaseRoute]) -> dict[str, Right]:
    """The right of every `METHOD /path`."""
    found: dict[str, Right] = {}
    for route in routes:
        if isinstance(route, GatewayRoute):
            found |= {f"{method} {route.path}": right for method, right in route.rights.items()}
        else:
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
