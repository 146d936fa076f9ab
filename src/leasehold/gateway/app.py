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

from leasehold import __version__
from leasehold.core.endpoint import Endpoint
from leasehold.core.errors import StoreError, UsageError
from leasehold.dashboard.redacting import USUAL
from leasehold.dashboard.site import Dashboard
from leasehold.gateway import pages
from leasehold.gateway.auditing import open_audit
from leasehold.gateway.auth import Door
from leasehold.gateway.dispatch import ROUTE, Desk, Resource
from leasehold.gateway.document import document
from leasehold.gateway.durability import Durability
from leasehold.gateway.edge import Edge
from leasehold.gateway.events_document import events_document
from leasehold.gateway.feed import Feed
from leasehold.gateway.joined_rings import open_keyrings
from leasehold.gateway.keys import Keys
from leasehold.gateway.limits import RateLimit
from leasehold.gateway.metrics import Metrics
from leasehold.gateway.operate import Operations
from leasehold.gateway.rings import open_side_store
from leasehold.gateway.served import Served, check_names, open_served
from leasehold.gateway.session import Sessions
from leasehold.gateway.settings import GatewaySettings
from leasehold.gateway.sse import Streamer
from leasehold.worker.logs import ensure_logs


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
            per_key=settings.streams_per_key,
            retry_ms=settings.retry_ms,
        )
        self.served = [open_served(url, settings, self.metrics) for url in settings.queues]
        check_names(self.served)
        self._side = open_side_store(settings.queues[0], "leasehold-audit")
        self._audit = open_audit(settings.queues[0], self._side)
        self.dashboard = Dashboard(
            self.served,
            Sessions(self.door, self.ring, settings),
            self._audit,
            redact=(*USUAL, *settings.redact),
            trace_url=settings.trace_url,
            lake=settings.lake,
            version=__version__,
            store_warnings=Durability(self._side[0] if self._side else None).warnings,
        )
        self.operations = Operations(
            self.served, self.ring, self.metrics, lambda: self.draining, self.dashboard.actor.steer
        )
        self._documents, router = self._routes()
        self._app = Edge(_straight(router), self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # with it the router raises its 404 and 405 instead of answering
        await self._app(scope, receive, send)

    async def check_safe(self) -> None:
        """Refuse to be open to the network without keys and without people who sign in."""
        if self.settings.on_loopback or self.settings.sso_groups:
            return
        try:
            keys = await self.ring.count()
        except StoreError as error:
            raise UsageError(
                f"bound to {self.settings.host} the gateway needs API keys, and whether there are "
                f"any could not be asked: {error}"
            ) from error
        if not keys:
            raise UsageError(
                f"the gateway would be open to everyone on {self.settings.host}: create a key with "
                "`leasehold keys create`, or bind to 127.0.0.1"
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

    def _routes(self) -> tuple[dict[str, bytes], Router]:
        desk = Desk(
            self.settings,
            self.door,
            self.streamer,
            RateLimit(self.settings.rate_per_s, self.settings.rate_burst),
        )
        routes: list[Route] = []
        everything: list[Endpoint] = []
        for url, served in zip(self.settings.queues, self.served, strict=True):
            endpoints = served.endpoints(self.settings)
            everything += endpoints
            routes += _resources(desk, endpoints, served.feed, url)
        own = [*self.operations.endpoints(), *self.dashboard.endpoints()]
        everything += own
        routes += _resources(desk, own, None)
        described = document(everything)
        self._docs_page = pages.docs(described)
        routes += self.dashboard.routes()
        documents = {
            "/openapi.json": msgspec.json.encode(described),
            "/asyncapi.json": msgspec.json.encode(events_document(everything)),
        }
        routes.append(Route("/docs", self._docs, methods=["GET"]))
        routes += [Route(path, self._described, methods=["GET"]) for path in documents]
        router = Router(routes, redirect_slashes=False, lifespan=self._lifespan)
        return documents, router

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

    async def _docs(self, request: Request) -> Response:
        request.scope[ROUTE] = "/docs"
        return _html(self._docs_page)

    async def _described(self, request: Request) -> Response:
        path = request.scope[ROUTE] = request.scope["path"]
        return Response(self._documents[path], media_type="application/json")


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
    desk: Desk, endpoints: Sequence[Endpoint], feed: Feed | None, queue_url: str = ""
) -> list[Route]:
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, []).append(endpoint)
    return [
        Route(path, Resource(desk, path, group, feed, queue_url)) for path, group in by_path.items()
    ]


__all__ = ["Gateway", "Served"]
