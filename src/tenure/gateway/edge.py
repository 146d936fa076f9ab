"""The outermost layer: request id, security headers, problems for every error, metrics.

Whatever happens further in, a client sees either a proper answer or a problem document.
"""

from __future__ import annotations

import itertools
import re
import secrets
import time
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tenure.gateway.body import ClientGone
from tenure.gateway.dispatch import ROUTE
from tenure.gateway.metrics import Metrics
from tenure.gateway.problems import CODES, MEDIA, Problem, problem_of

_log = structlog.get_logger("tenure.gateway")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.:-]{1,64}")
_CSP = b"default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
_SAFE: list[tuple[bytes, bytes]] = [
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_HSTS = (b"strict-transport-security", b"max-age=31536000")


class Edge:
    """Wraps the router."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics
        self._boot = secrets.token_hex(6)
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, send, self._request_id(scope))
        begun = time.perf_counter()
        try:
            await self._app(scope, receive, exchange.send)
        except (ClientGone, ClientDisconnect):
            return
        except Exception as error:
            await self._failed(error, exchange)
        self._count(exchange, time.perf_counter() - begun)

    def _request_id(self, scope: Scope) -> bytes:
        for name, value in scope["headers"]:
            if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
                return bytes(value)
        return f"{self._boot}-{next(self._numbers)}".encode()

    async def _failed(self, error: Exception, exchange: _Exchange) -> None:
        problem = _http_problem(error) if isinstance(error, HTTPException) else problem_of(error)
        if problem is None or problem.status == 503:
            _log.error(
                "request_failed",
                request_id=exchange.request_id.decode(),
                path=exchange.scope["path"],
                exc_info=error if problem is None else None,
                error=str(error),
            )
        elif problem.code in _QUOTAS:
            self._metrics.refused.labels(_QUOTAS[problem.code]).inc()
        if exchange.status:
            raise error  # half an answer is out: only the server can cut the connection now
        await exchange.refuse(problem or Problem("internal"))

    def _count(self, exchange: _Exchange, seconds: float) -> None:
        route = exchange.scope.get(ROUTE, "other")
        if exchange.streamed:
            self._metrics.streamed(route, exchange.status)
        else:
            self._metrics.answered(exchange.method, route, exchange.status, seconds)


class _Exchange:
    """One request's way out."""

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
            headers += _SAFE
            headers.append((b"x-request-id", self.request_id))
            if b"content-security-policy" not in names:
                headers.append((b"content-security-policy", _CSP))
            if b"cache-control" not in names:
                headers.append((b"cache-control", b"no-store"))
            if self.scope.get("scheme") == "https":
                headers.append(_HSTS)
            message = {**message, "headers": headers}
        await self._send(message)

    async def refuse(self, problem: Problem) -> None:
        """Answer with the problem."""
        body = problem.body(self.scope["path"], self.request_id.decode())
        headers = [(name.encode(), value.encode()) for name, value in problem.headers]
        headers += [(b"content-type", MEDIA), (b"content-length", b"%d" % len(body))]
        await self.send(
            {"type": "http.response.start", "status": problem.status, "headers": headers}
        )
        await self.send({"type": "http.response.body", "body": body})


_QUOTAS = {"rate_limited": "rate", "too_many_streams": "streams", "too_large": "body"}
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_BY_STATUS: dict[int, str] = {}
for _code, (_status, _) in CODES.items():
    _BY_STATUS.setdefault(_status, _code)


def _http_problem(error: HTTPException) -> Problem:
    """The router's own errors (404 above all) in our words."""
    code: Any = "not_found" if error.status_code == 404 else _BY_STATUS.get(error.status_code)
    headers = tuple((error.headers or {}).items())
    return Problem(code or "invalid", headers=headers)
