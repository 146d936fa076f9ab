"""The web application: a FastAPI application, or a router for one of your own.

This is the path of a request:

FastAPI -> Guard (request id, headers, problems, metrics)
  -> Resource (authenticate, limit, read) -> the contract's handler
                                          -> Streamer <- Feed <- journal, event streams
  -> Dashboard (pages, and /api for all contracts)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cached_property, partial
from typing import Any

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.params import Depends
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tenure import __version__
from tenure.core.endpoint import OPEN, Endpoint, Right, Submits
from tenure.core.errors import StoreError, UsageError
from tenure.dashboard.api import BASE
from tenure.dashboard.app import Dashboard
from tenure.dashboard.audit import open_audit
from tenure.gateway.auth import Auth, CallerHook, Sessions, headers_of
from tenure.gateway.feed import Feed
from tenure.gateway.http.body import BodyBudget, read_body
from tenure.gateway.http.document import BASE_MARK, HTML, POLICY, asyncapi_document, docs_page
from tenure.gateway.http.guard import Guard, GuardMiddleware, raise_again
from tenure.gateway.http.openapi import Operation
from tenure.gateway.http.resource import Resource, RouteContext
from tenure.gateway.http.routes import (
    GatewayRoute,
    replayed,
    resource_route,
    rights_of,
)
from tenure.gateway.keyrings import ask_once, open_keyrings, open_side_store
from tenure.gateway.keys import Keys
from tenure.gateway.limits import DepthLimit, RateLimit
from tenure.gateway.metrics import Metrics
from tenure.gateway.operations import (
    GatewayQueue,
    Operations,
    RedisWarnings,
    SubmitBatcher,
    open_queues,
)
from tenure.gateway.settings import GatewaySettings
from tenure.gateway.sse import Streamer
from tenure.worker.telemetry import ensure_logs

_ABOUT: dict[str, Any] = {
    "title": "Tenure",
    "version": __version__,
    "summary": "Jobs that are leased, never owned: submit, follow, cancel, steer.",
    "license_info": {"name": "MIT", "identifier": "MIT"},
}


def create_app(
    settings: GatewaySettings,
    *,
    caller: CallerHook | None = None,
    dependencies: Sequence[Depends] = (),
) -> FastAPI:
    """The gateway as a FastAPI application, for any ASGI server or to mount in another one.

    `caller` names the caller of a request by your own authentication; requests for which it returns
    None need an API key. `dependencies` run before every route of the gateway. Routes, middleware
    and exception handlers of your own are added as to any FastAPI application.
    """
    return Gateway(settings, caller=caller, dependencies=dependencies).app


def router(settings: GatewaySettings, *, caller: CallerHook | None = None) -> APIRouter:
    """The gateway as a router, to be included in a FastAPI application under any prefix.

    Including it also includes its lifespan. `caller` is as for `create_app`.
    """
    return Gateway(settings, caller=caller).router()


class Gateway:
    """The gateway of one process. `ring` replaces the key ring of the stores in tests."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        ring: Keys | None = None,
        caller: CallerHook | None = None,
        dependencies: Sequence[Depends] = (),
    ) -> None:
        if not settings.queues:
            raise UsageError("a gateway needs the URL of a queue")
        ensure_logs()
        self.settings = settings
        self.ring = ring or open_keyrings(settings.queues)
        self.metrics = Metrics()
        self.draining = False
        self._started = False
        self._asking: asyncio.Task[None] | None = None
        self._bodies = BodyBudget()
        self._auth = Auth(self.ring, settings, caller)
        self._streamer = Streamer(self._auth, self.metrics, retry_ms=settings.retry_ms)
        self.queues = open_queues(settings.queues, settings, self.metrics)
        self._side = open_side_store(settings.queues[0], "tenure-audit")
        self._audit = open_audit(settings.queues[0], self._side, keep=settings.audit_keep)
        self.dashboard = Dashboard(
            self.queues,
            Sessions(self._auth, self.ring, settings),
            self._audit,
            redact=settings.redact,
            trace_url=settings.trace_url,
            lake=settings.lake,
            version=__version__,
            store_warnings=RedisWarnings(self._side[0] if self._side else None),
            read_body=self._read_body,
            form_bytes_max=settings.form_bytes_max,
        )
        self._operations = Operations(
            self.queues,
            self.ring,
            self.metrics,
            lambda: self.draining,
            self.dashboard.actions.steer,
            self._audit,
        )
        self._guard = Guard(self.metrics, self._start)
        self._described: dict[tuple[str, str], Endpoint] = {}
        self._routes = self._own_routes()
        self.rights = rights_of(self._routes)
        self._dependencies = list(dependencies)
        self._documents: dict[str, bytes] = {}

    @cached_property
    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI(
            **_ABOUT,
            openapi_url=None,  # served by a route of our own, which encodes the document once
            redirect_slashes=False,
            lifespan=self._lifespan,
            exception_handlers={HTTPException: raise_again, RequestValidationError: raise_again},
        )
        exact: dict[str, ASGIApp] = {}
        if self._dependencies:
            app.include_router(
                APIRouter(routes=self._routes + self._operation_routes),
                dependencies=self._dependencies,
            )
        else:
            app.router.routes.extend(self._routes)
            exact = _exact_paths(self._routes)
            app.openapi = partial(self._openapi, app, app.openapi)  # type: ignore[method-assign]
        app.add_middleware(GuardMiddleware, guard=self._guard, exact=exact)
        app.state.gateway = self
        return app

    @property
    def asgi(self) -> ASGIApp:
        """The application for `tenure gateway`.

        Paths without parameters and event streams skip the layers of FastAPI, which only
        middleware of an application of the user's own needs. Each layer is a coroutine, and those
        of a stream stay in memory: a client would cost 24 kB instead of 16.
        """
        app, guard = self.app, self._guard
        exact = {} if self._dependencies else _exact_paths(self._routes)
        streams = [] if self._dependencies else _streams(self._routes)

        def asgi(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            if scope["type"] != "http" or scope.get("root_path"):
                return app(scope, receive, send)
            resource = exact.get(scope["path"])
            if resource is None:
                for route, raw in streams:
                    match, found = route.matches(scope)
                    if match is Match.FULL:
                        scope.update(found)
                        resource = raw
                        break
                else:
                    return app(scope, receive, send)
            return guard(resource, scope, receive, send)

        return asgi

    def router(self) -> APIRouter:
        """The routes, with the lifespan."""
        return APIRouter(routes=self._routes + self._operation_routes, lifespan=self._lifespan)

    @cached_property
    def _operation_routes(self) -> list[BaseRoute]:
        return [Operation(endpoint) for endpoint in self._described.values()]

    def _openapi(self, app: FastAPI, describe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The document of the application. Its models take half a second, so they are made late."""
        if self._operation_routes[0] not in app.router.routes:
            app.router.routes.extend(self._operation_routes)
        return describe()

    async def check_safe(self) -> None:
        """Refuse to listen on the network without API keys and without single sign-on."""
        if self.settings.on_loopback or self.settings.sso_groups:
            return
        where = " and ".join(filter(None, (self.settings.host, self.settings.admin_address)))
        try:
            keys = await self.ring.count()
        except StoreError as error:
            raise UsageError(
                f"bound to {where} the gateway needs API keys, and the store that keeps them "
                f"does not answer: {error}"
            ) from error
        if not keys:
            raise UsageError(
                f"the gateway would be open to everyone on {where}: create a key with "
                "`tenure keys create`, or bind to 127.0.0.1"
            )

    def drain(self) -> None:
        """Answer /readyz with 503 and end event streams, so that clients go to another gateway."""
        self.draining = True
        self._streamer.drain()
        self.dashboard.drain()
        for queue in self.queues:
            queue.drain()

    @property
    def streams(self) -> int:
        """How many event streams are open."""
        return sum(queue.feed.clients for queue in self.queues)

    @property
    def openapi(self) -> bytes:
        """The OpenAPI document."""
        return self._document("openapi")

    @property
    def asyncapi(self) -> bytes:
        """The AsyncAPI document."""
        return self._document("asyncapi")

    def _own_routes(self) -> list[BaseRoute]:
        context = RouteContext(
            self.settings,
            self._auth,
            self._streamer,
            RateLimit(),
            self._audit,
            self.dashboard.searches,
            self._bodies,
        )
        groups: list[tuple[list[Endpoint], Feed | None, str]] = [
            (queue.endpoints(self.settings, self._depth_limit(queue)), queue.feed, queue.name)
            for queue in self.queues
        ]
        groups.append(([*self._operations.endpoints(), *self.dashboard.endpoints()], None, ""))
        routes: list[BaseRoute] = []
        for endpoints, feed, name in groups:
            routes += self._resource_routes(context, endpoints, feed, name)
        routes += [
            self._page(route.path, route.endpoint, dict.fromkeys(_methods(route), right))
            for route, right in self.dashboard.declared
        ]
        for path in ("/openapi.json", "/asyncapi.json", "/docs"):
            routes.append(self._page(path, self._serve_document, {"GET": OPEN}, is_open=True))
        for endpoint in (endpoint for endpoints, *_ in groups for endpoint in endpoints):
            # Of two queues of one contract the first is served.
            self._described.setdefault((endpoint.path, endpoint.method), endpoint)
        return routes

    def _resource_routes(
        self,
        context: RouteContext,
        endpoints: Sequence[Endpoint],
        feed: Feed | None,
        queue: str,
    ) -> list[GatewayRoute]:
        by_path: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            by_path.setdefault(endpoint.path, []).append(endpoint)
        return [
            resource_route(
                path,
                Resource(context, path, group, feed, queue),
                self._guard,
                {endpoint.method: endpoint.right for endpoint in group},
                admin_only=bool(self.settings.admin_address) and any(map(_is_admin, group)),
            )
            for path, group in by_path.items()
        ]

    def _page(
        self,
        path: str,
        endpoint: Callable[[Request], Awaitable[Response]],
        rights: Mapping[str, Right],
        *,
        is_open: bool = False,
    ) -> GatewayRoute:
        return GatewayRoute(
            path,
            endpoint,
            guard=self._guard,
            rights=rights,
            admin_only=bool(self.settings.admin_address) and not is_open,
        )

    def _depth_limit(self, queue: GatewayQueue) -> Submits:
        """The `submit` of a queue: batched, and limited by the unfinished jobs of each key.

        There is no limit if the ledger cannot count the jobs of a requester.
        """
        batcher, refused = SubmitBatcher(queue.queue), self.metrics.refused.labels("depth").inc
        unfinished = queue.ledger.features.unfinished
        if unfinished is None:
            return batcher
        return DepthLimit(batcher, unfinished, self._auth.quota, refused)

    def _start(self) -> None:
        """Start what runs beside requests. The first request does it if there is no lifespan."""
        if self._started:
            return
        self._started = True
        for queue in self.queues:
            queue.start()
        self._streamer.start()
        self._asking = asyncio.create_task(ask_once(self.ring))

    @asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        self._start()
        try:
            yield
        finally:
            if self._asking is not None:
                self._asking.cancel()
            self._streamer.drain()
            await self._streamer.close()
            await self.dashboard.close()
            for queue in self.queues:
                await queue.close()
            await self.ring.close()
            await self._audit.close()
            if self._side is not None:
                await self._side[0].close()

    async def _read_body(self, request: Request, bytes_max: int) -> bytes:
        headers = headers_of(request.scope)
        timeout_ms = self.settings.body_timeout_ms
        with self._bodies.hold("") as hold:
            return await read_body(replayed(request), headers, bytes_max, timeout_ms, hold)

    async def _serve_document(self, request: Request) -> Response:
        name = request.scope["path"].rpartition("/")[2].removesuffix(".json")
        document, base = self._document(name), request.scope[BASE]
        if name == "docs":
            headers = {"content-security-policy": POLICY, "content-type": HTML}
            return Response(document.replace(BASE_MARK.encode(), base.encode()), headers=headers)
        if name == "openapi" and base:
            servers = msgspec.json.encode({"servers": [{"url": base}]})
            document = servers[:-1] + b"," + document[1:]
        return Response(document, media_type="application/json")

    def _document(self, name: str) -> bytes:
        """A document of the API, made when it is first asked for."""
        if name not in self._documents:
            self._documents[name] = self._describe(name)
        return self._documents[name]

    def _describe(self, name: str) -> bytes:
        if name == "asyncapi":
            return msgspec.json.encode(asyncapi_document(self._described.values()))
        if "app" in self.__dict__:
            document = self.app.openapi()  # with the routes that were added to it
        else:
            document = get_openapi(**_ABOUT, routes=self._operation_routes)
        return docs_page(document) if name == "docs" else msgspec.json.encode(document)


def _is_admin(endpoint: Endpoint) -> bool:
    """Whether an endpoint is served only at the admin address, if there is one."""
    return endpoint.right.scope in ("admin", "observe") or endpoint.path == "/metrics"


def _methods(route: Route) -> list[str]:
    return sorted((route.methods or set()) - {"HEAD"})


def _exact_paths(routes: Sequence[BaseRoute]) -> dict[str, ASGIApp]:
    """The resources of paths without parameters that are served at every address."""
    found: dict[str, ASGIApp] = {}
    for route in routes:
        if not isinstance(route, GatewayRoute) or route.raw is None or route.admin_only:
            continue
        if "{" not in route.path:
            found.setdefault(route.path, route.raw)
    return found


def _streams(routes: Sequence[BaseRoute]) -> list[tuple[GatewayRoute, ASGIApp]]:
    """The routes of event streams that are served at every address, with their resources."""
    return [
        (route, route.raw)
        for route in routes
        if isinstance(route, GatewayRoute)
        and not route.admin_only
        and isinstance(route.raw, Resource)
        and route.raw.is_stream
    ]
