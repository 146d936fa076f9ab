"""The web application. This is the path of a request:

Middleware (request id, headers, problems, metrics)
  -> Router -> Resource (authenticate, limit, read) -> the contract's handler
                                                    -> Streamer <- Feed <- journal, event streams
            -> Dashboard (pages, and /api for all contracts)
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenure import __version__
from tenure.core.endpoint import OPEN, Endpoint, Submits
from tenure.core.errors import StoreError, UsageError
from tenure.dashboard.api import ROUTE
from tenure.dashboard.app import Dashboard
from tenure.dashboard.audit import open_audit
from tenure.gateway.auth import Auth, Sessions, headers_of
from tenure.gateway.feed import Feed
from tenure.gateway.http.connections import ADMIN
from tenure.gateway.http.dispatch import Resource, RouteContext, read_body, rights_of
from tenure.gateway.http.document import (
    HTML,
    POLICY,
    asyncapi_document,
    docs_page,
    openapi_document,
)
from tenure.gateway.keyrings import open_keyrings, open_side_store
from tenure.gateway.keys import Keys
from tenure.gateway.limits import DepthLimit, FailureLog, RateLimit
from tenure.gateway.metrics import Metrics
from tenure.gateway.operations import (
    GatewayQueue,
    Operations,
    RedisWarnings,
    SubmitBatcher,
    open_queues,
)
from tenure.gateway.problems import CODES, MEDIA, Problem, problem_of
from tenure.gateway.settings import GatewaySettings
from tenure.gateway.sse import Streamer
from tenure.worker.telemetry import ensure_logs

_log = structlog.get_logger("tenure.gateway")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,64}")
_CSP = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_SECURITY_HEADERS: list[tuple[bytes, bytes]] = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_HSTS = (b"strict-transport-security", b"max-age=31536000")


_QUOTAS = {"rate_limited": "rate", "too_many_streams": "streams", "too_large": "body"}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BY_STATUS: dict[int, str] = {}
for _code, (_status, _) in CODES.items():
    _BY_STATUS.setdefault(_status, _code)


class Gateway:
    """The ASGI application of one process. `ring` replaces the key ring of the stores in tests."""

    def __init__(self, settings: GatewaySettings, *, ring: Keys | None = None) -> None:
        if not settings.queues:
            raise UsageError("a gateway needs the URL of a queue")
        ensure_logs()
        self.settings = settings
        self.ring = ring or open_keyrings(settings.queues)
        self.metrics = Metrics()
        self.draining = False
        self._auth = Auth(self.ring, settings)
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
        self._documents, app = self._routes()
        self._app = _Middleware(app, self.metrics)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = self  # makes the router raise 404 and 405, so that they become problems
        await self._app(scope, receive, send)

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
        return self._documents["/openapi.json"]

    @property
    def asyncapi(self) -> bytes:
        """The AsyncAPI document."""
        return self._documents["/asyncapi.json"]

    def _routes(self) -> tuple[dict[str, bytes], ASGIApp]:
        context = RouteContext(
            self.settings,
            self._auth,
            self._streamer,
            RateLimit(),
            self._audit,
            self.dashboard.searches,
        )
        own = [*self._operations.endpoints(), *self.dashboard.endpoints()]
        groups: list[tuple[list[Endpoint], Feed | None, str]] = [
            (queue.endpoints(self.settings, self._depth_limit(queue)), queue.feed, queue.name)
            for queue in self.queues
        ]
        groups.append((own, None, ""))
        everything = [endpoint for endpoints, *_ in groups for endpoint in endpoints]
        openapi = openapi_document(everything)
        self._docs_page = docs_page(openapi)
        documents = {
            "/openapi.json": msgspec.json.encode(openapi),
            "/asyncapi.json": msgspec.json.encode(asyncapi_document(everything)),
        }
        document_routes = [Route(path, self._document, methods=["GET"]) for path in documents]
        document_routes.append(Route("/docs", self._docs, methods=["GET"]))

        def router_of(with_admin: bool) -> Router:
            routes = [
                route
                for endpoints, feed, name in groups
                for route in _resources(
                    context,
                    [each for each in endpoints if with_admin or not _is_admin(each)],
                    feed,
                    name,
                )
            ]
            routes += [*(self.dashboard.routes() if with_admin else ()), *document_routes]
            return Router(routes, redirect_slashes=False, lifespan=self._lifespan)

        router = router_of(with_admin=True)
        pages = self.dashboard.rights | dict.fromkeys(("/docs", *documents), OPEN)
        self.rights = rights_of(router.routes, pages)
        whole = _with_shortcut(router)
        if not self.settings.admin_address:
            return documents, whole
        public = _with_shortcut(router_of(with_admin=False))

        async def by_address(scope: Scope, receive: Receive, send: Send) -> None:
            await (whole if ADMIN in scope else public)(scope, receive, send)

        return documents, by_address

    def _depth_limit(self, queue: GatewayQueue) -> Submits:
        """The `submit` of a queue: batched, and limited by the unfinished jobs of each key.

        There is no limit if the ledger cannot count the jobs of a requester.
        """
        batcher, refused = SubmitBatcher(queue.queue), self.metrics.refused.labels("depth").inc
        unfinished = queue.ledger.features.unfinished
        if unfinished is None:
            return batcher
        return DepthLimit(batcher, unfinished, self._auth.quota, refused)

    @asynccontextmanager
    async def _lifespan(self, app: object) -> AsyncIterator[None]:
        for queue in self.queues:
            queue.start()
        self._streamer.start()
        try:
            yield
        finally:
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
        return await read_body(request.receive, headers, bytes_max, self.settings.body_timeout_ms)

    async def _docs(self, request: Request) -> Response:
        request.scope[ROUTE] = "/docs"
        headers = {"content-security-policy": POLICY, "content-type": HTML}
        return Response(self._docs_page, headers=headers)

    async def _document(self, request: Request) -> Response:
        path = request.scope[ROUTE] = request.scope["path"]
        return Response(self._documents[path], media_type="application/json")


def _is_admin(endpoint: Endpoint) -> bool:
    """Whether an endpoint is served only at the admin address, if there is one."""
    return endpoint.right.scope in ("admin", "observe") or endpoint.path == "/metrics"


def _with_shortcut(router: Router) -> ASGIApp:
    """Looks up paths without parameters, such as /v1/jobs, in a dict; the router matches others."""
    exact = {
        route.path: route.app
        for route in router.routes
        if isinstance(route, Route) and isinstance(route.app, Resource) and "{" not in route.path
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await exact.get(scope.get("path", ""), router)(scope, receive, send)

    return app


def _resources(
    context: RouteContext,
    endpoints: Sequence[Endpoint],
    feed: Feed | None,
    queue: str = "",
) -> list[Route]:
    by_path: dict[str, list[Endpoint]] = {}
    for endpoint in endpoints:
        by_path.setdefault(endpoint.path, []).append(endpoint)
    return [
        Route(path, Resource(context, path, group, feed, queue)) for path, group in by_path.items()
    ]


class _Middleware:
    """Wraps the router: request id, security headers, problems, metrics.

    Every error becomes a problem document, unless the response has already begun.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._failures = FailureLog()
        self._boot = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, self._request_id(scope))
        started = time.perf_counter()
        try:
            await self._app(scope, receive, exchange.send)
        except ClientDisconnect:
            return
        except Exception as error:
            await self._answer_error(error, exchange)
        self._count(exchange, time.perf_counter() - started)

    def _request_id(self, scope: Scope) -> bytes:
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return bytes(value)
        return f"{self._boot}-{next(self._numbers)}".encode()

    async def _answer_error(self, error: Exception, exchange: _Exchange) -> None:
        problem = _http_problem(error) if isinstance(error, HTTPException) else problem_of(error)
        if problem is None or problem.status == 503:
            code = problem.code if problem is not None else ""
            self._failures.log(error, code, exchange.scope, exchange.request_id.decode())
        elif problem.code in _QUOTAS:
            self._metrics.refused.labels(_QUOTAS[problem.code]).inc()
        if exchange.status:
            raise error  # the response has begun, so only the server can end the connection
        await exchange.send_problem(problem or Problem("internal"))

    def _count(self, exchange: _Exchange, seconds: float) -> None:
        route = exchange.scope.get(ROUTE, "other")
        if exchange.streamed:
            self._metrics.streamed(route, exchange.status)
        else:
            self._metrics.answered(exchange.method, route, exchange.status, seconds)


class _Exchange:
    """One request and its response."""

    __slots__ = ("_send", "method", "request_id", "scope", "status", "streamed")

    def __init__(self, scope: Scope, send: Send, request_id: bytes) -> None:
        self.scope = scope
        self._send = send
        self.request_id = request_id
        self.method: str = scope["method"] if scope["method"] in _METHODS else "other"
        self.status = 0
        self.streamed = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = list(message["headers"])
            names = {name for name, _ in headers}
            self.streamed = (b"x-accel-buffering", b"no") in headers
            headers += _SECURITY_HEADERS
            headers.append((b"x-request-id", self.request_id))
            if b"content-security-policy" not in names:
                headers.append((b"content-security-policy", _CSP))
            if b"cache-control" not in names:
                headers.append((b"cache-control", b"no-store"))
            if self.scope.get("scheme") == "https":
                headers.append(_HSTS)
            message = {**message, "headers": headers}
        await self._send(message)

    async def send_problem(self, problem: Problem) -> None:
        """Send the problem document as the response."""
        body = problem.body(self.scope["path"], self.request_id.decode())
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        headers += [(b"content-type", MEDIA), (b"content-length", b"%d" % len(body))]
        await self.send(
            {"type": "http.response.start", "status": problem.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": body})


def _http_problem(error: HTTPException) -> Problem:
    """Errors of the router, such as 404, as problems."""
    code: Any = "not_found" if error.status_code == 404 else _BY_STATUS.get(error.status_code)
    headers = tuple((error.headers or {}).items())
    return Problem(code or "invalid", headers=headers)
