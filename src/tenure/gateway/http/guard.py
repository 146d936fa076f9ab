"""What surrounds every request: its id, security headers, problems for errors, and metrics."""

from __future__ import annotations

import itertools
import re
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenure.dashboard.api import BASE, ROUTE
from tenure.gateway.limits import FailureLog
from tenure.gateway.metrics import Metrics
from tenure.gateway.problems import CODES, MEDIA, Problem, problem_of, title_of

_GUARDED = "tenure.guarded"
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
_BY_STATUS: dict[int, str] = {404: "not_found"}
for _code, (_status, _) in CODES.items():
    _BY_STATUS.setdefault(_status, _code)


class Guard:
    """Runs an ASGI application with what surrounds every request.

    Every error becomes a problem document, unless the response has already begun. `start` starts
    the gateway: Starlette does not run the lifespan of an application that is mounted in another.
    """

    def __init__(self, metrics: Metrics, start: Callable[[], None]) -> None:
        self._metrics = metrics
        self._start = start
        self._failures = FailureLog()
        self._boot = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    async def __call__(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        if _GUARDED in scope:
            await app(scope, receive, send)
            return
        scope[_GUARDED] = True
        self._start()
        exchange = _Exchange(scope, send, self._request_id(scope))
        started = time.perf_counter()
        try:
            await app(scope, receive, exchange.send)
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
        problem = _http_problem(error) or problem_of(error)
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


class GuardMiddleware:
    """The guard of a whole application.

    `exact` has the resources of paths without parameters, such as /v1/jobs. They are called without
    FastAPI's router: looking them up here costs less.
    """

    def __init__(self, app: ASGIApp, guard: Guard, exact: Mapping[str, ASGIApp]) -> None:
        self._app = app
        self._guard = guard
        self._exact = exact

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        app = self._app
        if not scope.get("root_path"):
            app = self._exact.get(scope["path"], app)
        await self._guard(app, scope, receive, send)


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
        scope = self.scope
        base = scope.get(BASE) or quote(scope.get("root_path", ""))
        body = problem.body(scope["path"], self.request_id.decode(), base)
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        headers += [(b"content-type", MEDIA), (b"content-length", b"%d" % len(body))]
        await self.send(
            {"type": "http.response.start", "status": problem.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": body})


async def raise_again(request: Request, error: Exception) -> Any:
    """An exception handler for FastAPI that leaves the answer to the guard."""
    raise error


def _http_problem(error: Exception) -> Problem | None:
    """Errors of FastAPI as problems, such as 404 and those of an application's own routes."""
    if isinstance(error, RequestValidationError):
        faults = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        return Problem("invalid", "; ".join(faults))
    if not isinstance(error, HTTPException):
        return None
    code = _BY_STATUS.get(error.status_code, "invalid")
    usual = error.detail in (title_of(error.status_code), "Not Found", "Method Not Allowed")
    problem = Problem(
        code, "" if usual else str(error.detail), headers=tuple((error.headers or {}).items())
    )
    problem.status = error.status_code
    return problem
