"""The web application: what a request passes on its way to a contract, put together.

Edge (request id, headers, problems, metrics)
  -> Router -> Resource (admit, limit, read) -> the contract's handler
                                             -> Streamer <- Feed <- journal and event streams
            -> Dashboard (pages, and /api for all contracts)
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tenure import __version__
from tenure.core.endpoint import OPEN, Endpoint
from tenure.core.errors import StoreError, UsageError
from tenure.dashboard.site import RIGHTS, Dashboard
from tenure.gateway import pages
from tenure.gateway.auditing import open_audit
from tenure.gateway.auth import Door
from tenure.gateway.body import read_body
from tenure.gateway.connections import ADMIN
from tenure.gateway.dispatch import ROUTE, Desk, Resource, headers_of
from tenure.gateway.document import document
from tenure.gateway.durability import Durability
from tenure.gateway.edge import Edge
from tenure.gateway.events_document import events_document
from tenure.gateway.feed import Feed
from tenure.gateway.gather import GatheredSubmits
from tenure.gateway.joined_rings import open_keyrings
from tenure.gateway.keys import Keys
from tenure.gateway.limits import DepthLimit, RateLimit
from tenure.gateway.metrics import Metrics
from tenure.gateway.operate import Operations
from tenure.gateway.rights import rights_of
from tenure.gateway.rings import open_side_store
from tenure.gateway.served import Served, check_names, open_served
from tenure.gateway.session import Sessions
from tenure.gateway.settings import GatewaySettings
from tenure.gateway.sse import Streamer
from tenure.worker.telemetry import ensure_logs


class Gateway:
    """The ASGI application of one process. `ring` is only given to share one, or in tests."""

    def __init__(self, settings: GatewaySettings, *, ring: Keys | None = None) -> None:
        if not settings.queues:
            raise UsageError("a gateway needs the URL of a queue")
        ensure_logs()
        self.settings = settings
        self.ring = ring or open_keyrings(settings.queues)
        self.metrics = Metrics()
        self.draining = False
        self.door = Door(self.ring, settings)
        self.streamer = Streamer(
            self.door,
            self.metrics,
            retry_ms=settings.retry_ms,
        )
        self.served = [open_served(url, settings, self.metrics) for url in settings.queues]
        check_names(self.served)
        self._side = open_side_store(settings.queues[0], "tenure-audit")
        self._audit = open_audit(settings.queues[0], self._side, keep=settings.audit_keep)
        self.dashboard = Dashboard(
            self.served,
            Sessions(self.door, self.ring, settings),
            self._audit,
            redact=settings.redact,
            trace_url=settings.trace_url,
            lake=settings.lake,
            version=__version__,
            store_warnings=Durability(self._side[0] if self._side else None).warnings,
            read_body=self._read_body,
            form_bytes_max=settings.form_bytes_max,
        )
        self.operations = Operations(
            self.served,
            self.ring,
            self.metrics,
            lambda: self.draining,
            self.dashboard.actor.steer,
            self._audit,
        )
        self._documents, app = self._routes()
        self._app = Edge(app, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # with it the router raises its 404 and 405 instead of answering
        await self._app(scope, receive, send)

    async def check_safe(self) -> None:
        """Refuse to be open to the network without keys and without people who sign in."""
        if self.settings.on_loopback or self.settings.sso_groups:
            return
        where = " and ".join(filter(None, (self.settings.host, self.settings.admin_address)))
        try:
            keys = await self.ring.count()
        except StoreError as error:
            raise UsageError(
                f"bound to {where} the gateway needs API keys, and whether there are "
                f"any could not be asked: {error}"
            ) from error
        if not keys:
            raise UsageError(
                f"the gateway would be open to everyone on {where}: create a key with "
                "`tenure keys create`, or bind to 127.0.0.1"
            )

    def drain(self) -> None:
        """Turn /readyz to 503 and send the followers to another gateway."""
        self.draining = True
        self.streamer.drain()
        self.dashboard.drain()
        for served in self.served:
            served.drain()

    @property
    def openapi(self) -> bytes:
        """What can be asked: the OpenAPI document."""
        return self._documents["/openapi.json"]

    @property
    def asyncapi(self) -> bytes:
        """What is said without being asked: the AsyncAPI document."""
        return self._documents["/asyncapi.json"]

    def _routes(self) -> tuple[dict[str, bytes], ASGIApp]:
        desk = Desk(self.settings, self.door, self.streamer, RateLimit(), self._audit)
        own = [*self.operations.endpoints(), *self.dashboard.endpoints()]
        groups: list[tuple[list[Endpoint], Feed | None, str, str]] = [
            (
                served.endpoints(self.settings, self._within_depth(served)),
                served.feed,
                url,
                served.name,
            )
            for url, served in zip(self.settings.queues, self.served, strict=True)
        ]
        groups.append((own, None, "", ""))
        everything = [endpoint for endpoints, *_ in groups for endpoint in endpoints]
        described = document(everything)
        self._docs_page = pages.docs(described)
        documents = {
            "/openapi.json": msgspec.json.encode(described),
            "/asyncapi.json": msgspec.json.encode(events_document(everything)),
        }
        described_at = [Route(path, self._described, methods=["GET"]) for path in documents]
        described_at.append(Route("/docs", self._docs, methods=["GET"]))

        def answering(with_admin: bool) -> Router:
            routes = [
                route
                for endpoints, feed, url, name in groups
                for route in _resources(
                    desk,
                    [each for each in endpoints if with_admin or not _is_admin(each)],
                    feed,
                    url,
                    name,
                )
            ]
            routes += [*(self.dashboard.routes() if with_admin else ()), *described_at]
            return Router(routes, redirect_slashes=False, lifespan=self._lifespan)

        router = answering(with_admin=True)
        self.rights = rights_of(router.routes, RIGHTS | dict.fromkeys(("/docs", *documents), OPEN))
        whole = _straight(router)
        if not self.settings.admin_address:
            return documents, whole
        public = _straight(answering(with_admin=False))

        async def by_address(scope: Scope, receive: Receive, send: Send) -> None:
            await (whole if ADMIN in scope else public)(scope, receive, send)

        return documents, by_address

    def _within_depth(self, served: Served) -> DepthLimit:
        """Submits to a queue, within the depths of the keys."""
        queue, refused = GatheredSubmits(served.queue), self.metrics.refused.labels("depth").inc
        return DepthLimit(queue, served.ledger, self.door.quota, refused)

    @asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        for served in self.served:
            served.start()
        self.streamer.start()
        try:
            yield
        finally:
            self.streamer.drain()
            await self.streamer.close()
            await self.dashboard.close()
            for served in self.served:
                await served.close()
            await self.ring.close()
            await self._audit.close()
            if self._side is not None:
                await self._side[0].close()

    async def _read_body(self, request: Request, bytes_max: int) -> bytes:
        headers = headers_of(request.scope)
        return await read_body(request.receive, headers, bytes_max, self.settings.body_timeout_ms)

    async def _docs(self, request: Request) -> Response:
        request.scope[ROUTE] = "/docs"
        return _html(self._docs_page)

    async def _described(self, request: Request) -> Response:
        path = request.scope[ROUTE] = request.scope["path"]
        return Response(self._documents[path], media_type="application/json")


def _is_admin(endpoint: Endpoint) -> bool:
    """Whether an endpoint belongs to the admin address, where there is one."""
    return endpoint.right.scope in ("admin", "observe") or endpoint.path == "/metrics"


def _html(page: bytes) -> Response:
    headers = {"content-security-policy": pages.POLICY, "content-type": pages.MEDIA}
    return Response(page, headers=headers)


def _straight(router: Router) -> ASGIApp:
    """The router, with a short cut to paths without parameters: POST /v1/jobs is asked most."""
    exact = {
        route.path: route.app
        for route in router.routes
        if isinstance(route, Route) and isinstance(route.app, Resource) and "{" not in route.path
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await exact.get(scope.get("path", ""), router)(scope, receive, send)

    return app


def _resources(
    desk: Desk,
    endpoints: Sequence[Endpoint],
    feed: Feed | None,
    queue_url: str = "",
    queue: str = "",
) -> list[Route]:
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, []).append(endpoint)
    return [
        Route(path, Resource(desk, path, group, feed, queue_url, queue))
        for path, group in by_path.items()
    ]


__all__ = ["Gateway", "Served"]
