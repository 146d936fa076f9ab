"""The dashboard, put together: parts, pages, and the way a request takes to a page.

The gateway gives it queues, a doorkeeper and a place for the audit log, and mounts its routes and
endpoints. Pages are admitted here: without a caller they lead to /login, posted forms need the
right to act.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tenure.core.endpoint import OPEN, Endpoint, Refused, Right
from tenure.core.errors import NotFound, StoreError, TenureError
from tenure.core.redacting import Redaction
from tenure.dashboard import charts, wording
from tenure.dashboard.acting import Actor
from tenure.dashboard.api import Api
from tenure.dashboard.assets import assets
from tenure.dashboard.audit import AuditLog
from tenure.dashboard.delivering import outboxes
from tenure.dashboard.doorkeeper import Doorkeeper
from tenure.dashboard.finding import Finder
from tenure.dashboard.forms import Forms
from tenure.dashboard.gathering import Warn
from tenure.dashboard.house import House, Street
from tenure.dashboard.kinds import KINDS, kind_of
from tenure.dashboard.live import Live
from tenure.dashboard.outbox_api import OutboxApi
from tenure.dashboard.pages import Page, Pages
from tenure.dashboard.visit import (
    Notices,
    Searches,
    Visit,
    local_path,
    path_of,
    read_fields,
    with_params,
)
from tenure.dashboard.watching import Watch

_log = structlog.get_logger("tenure.dashboard")

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
ROUTE = "tenure.route"
_LOOK = Right("observe", "all")
RIGHTS = {
    **dict.fromkeys(("/", "/jobs", "/jobs/confirm", "/jobs/{queue}/{job_id:path}"), _LOOK),
    **dict.fromkeys(("/queues", "/workers", "/dead", "/outbox", "/history"), _LOOK),
    **dict.fromkeys(("/audit", "/bulk/{bulk_id}", "/live"), _LOOK),
    "/ui/act": Right("admin", "all", does="VERB", audit="handler"),
    "/ui/bulk": Right("admin", "all", does="VERB all", audit="handler"),
    "/ui/bulk/stop": Right("admin", "all", does="stop VERB all", audit="handler"),
    "/ui/queue": Right("admin", "all", does="pause or resume", audit="handler"),
    "/ui/redeliver": Right("admin", "all", does="redeliver", audit="handler"),
    "/ui/submit": Right("admin", "all", does="submit", audit="handler"),
    "/ui/replay": Right("admin", "all", does="replay JOB", audit="handler"),
    **dict.fromkeys(("/login", "/logout"), Right("", "none", does="sign in, out", audit="never")),
    "/static/{digest}/{name}": OPEN,
}
"""What each page, form and file asks of its caller. A route that is not here is not served."""

_AWAY = {
    "title": "The store does not answer",
    "text": "This page comes back by itself when the store does. What helps: tenure doctor",
}
_PIECE = 1 << 16
_LOGIN_BYTES_MAX = 8_192
_FOR_EVER = "public, max-age=31536000, immutable"


async def _none() -> list[Warn]:
    return []


class Dashboard:
    """One per gateway process. Call `close` in its event loop."""

    def __init__(
        self,
        houses: Iterable[House],
        door: Doorkeeper,
        audit: AuditLog,
        *,
        redact: Iterable[str] = (),
        trace_url: str = "",
        lake: str = "",
        version: str = "",
        store_warnings: Callable[[], Awaitable[list[Warn]]] = _none,
        read_body: Callable[[Request, int], Awaitable[bytes]],
        form_bytes_max: int,
    ) -> None:
        street = Street(houses)
        redaction = Redaction(redact)
        self._door = door
        self._has_outbox = bool(outboxes(street))
        self._version = version
        self._read_body = read_body
        self._form_bytes_max = form_bytes_max
        self._notices = Notices()
        self.watch = Watch(street)
        self.live = Live(self.watch)
        finder = Finder(street, redaction)
        self.actor = Actor(street, finder, audit)
        self.searches = Searches()
        self._api = Api(street, finder, self.actor, self.watch, redaction, self.searches)
        self._outbox_api = OutboxApi(street, self.actor, redaction)
        self._pages = Pages(
            street,
            finder,
            self.actor,
            self.watch,
            redaction,
            trace_url=trace_url,
            lake=lake,
            store_warnings=store_warnings,
        )
        self._forms = Forms(street, finder, self.actor, self._notices, redaction)
        self._templates = _templates()

    def endpoints(self) -> list[Endpoint]:
        """/api, for programs."""
        return [*self._api.endpoints(), *self._outbox_api.endpoints()]

    def drain(self) -> None:
        """The gateway is on its way out."""
        self.live.drain()

    async def close(self) -> None:
        """Stop everything that runs."""
        self.live.drain()
        await self.actor.close()
        await self.watch.close()

    def routes(self) -> list[Route]:
        """Pages, forms and files."""
        pages = self._pages
        shown: dict[str, Callable[[Visit], Coroutine[Any, Any, Page]]] = {
            "/": pages.overview,
            "/jobs": pages.jobs,
            "/jobs/confirm": pages.confirm,
            "/jobs/{queue}/{job_id:path}": pages.job,
            "/queues": pages.queues,
            "/workers": pages.workers,
            "/dead": pages.dead,
            "/outbox": pages.outbox,
            "/history": pages.history,
            "/audit": pages.audit,
            "/bulk/{bulk_id}": pages.bulk,
        }
        routes = [Route(path, self._page(path, handle)) for path, handle in shown.items()]
        for path, act in self._forms.handlers().items():
            routes.append(Route(path, self._form(path, act), methods=["POST"]))
        return [
            Route("/live", self._live),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            Route("/static/{digest}/{name}", _static),
            *routes,
        ]

    def _page(self, path: str, handle: Callable[[Visit], Coroutine[Any, Any, Page]]) -> Any:
        async def endpoint(request: Request) -> Response:
            with ExitStack() as place:
                return _Held(await shown(request, place), place.pop_all())

        async def shown(request: Request, place: ExitStack) -> Response:
            request.scope[ROUTE] = path
            visit: Visit | None = None
            try:
                admitted = await self._visit(request, RIGHTS[path])
                if isinstance(admitted, Response):
                    return admitted
                visit = admitted
                self.watch.touch()
                place.enter_context(self.searches.place(visit.who))
                page = await self.searches.attended(partial(_gone, request), handle(visit))
            except NotFound as error:
                page = Page("problem.html", {"title": "Not found", "text": str(error)}, status=404)
            except StoreError as error:
                _log.warning("page_store_away", path=path, error=str(error))
                page = Page("problem.html", _AWAY, status=503)
            except TenureError as error:
                words = {"title": "Not possible", "text": str(error)}
                status = 429 if isinstance(error, Refused) else 409
                page = Page("problem.html", words, status=status)
            return self._render(visit, page)

        return endpoint

    def _form(self, path: str, act: Callable[[Visit], Awaitable[str]]) -> Any:
        async def endpoint(request: Request) -> Response:
            request.scope[ROUTE] = path
            visit = await self._visit(request, RIGHTS[path])
            if isinstance(visit, Response):
                return visit
            body = await self._read_body(request, self._form_bytes_max)
            # In a thread: a large form takes long enough to hold up other requests.
            form = await asyncio.to_thread(read_fields, request, body)
            try:
                target = await act(replace(visit, form=form))
            except TenureError as error:
                back = local_path(dict(form).get("next", ""), "/")
                target = _noticed(back, self._notices.leave(f"Not done: {error}"))
            return RedirectResponse(target, 303)

        return endpoint

    async def _visit(self, request: Request, right: Right) -> Visit | Response:
        caller = await self._door.caller(request)
        if caller is None:
            query = request.scope["query_string"].decode("latin-1")
            here = path_of(request) + (f"?{query}" if query else "")
            back = here if request.method == "GET" else "/"
            return RedirectResponse(with_params("/login", next=back), 303)
        visit = Visit(request, caller)
        refusal = right.refusal(caller)
        if refusal:
            words = {"title": "Not for this key", "text": refusal}
            return self._render(visit, Page("problem.html", words, status=403))
        return visit

    async def _live(self, request: Request) -> Any:
        request.scope[ROUTE] = "/live"
        caller = await self._door.caller(request)
        if caller is None:
            return Response(status_code=401)
        if RIGHTS["/live"].refusal(caller):
            return Response(status_code=403)
        if self.live.is_full:
            return Response(status_code=503, headers={"retry-after": "1"})
        if self.live.is_full_of(caller.who):
            return Response(status_code=429, headers={"retry-after": "1"})
        self.watch.touch()
        queue = str(request.query_params.get("queue", ""))
        known = queue if queue in self.watch.observers else ""

        def is_still_in() -> Awaitable[bool]:
            return self._door.is_still_in(request, caller)

        return _Streamed(
            lambda receive, send: self.live.serve(known, receive, send, is_still_in, who=caller.who)
        )

    async def _login(self, request: Request) -> Response:
        request.scope[ROUTE] = "/login"
        if request.method == "GET":
            back = local_path(str(request.query_params.get("next", "/")), "/")
            return self._render(None, Page("login.html", {"title": "Sign in", "next": back}))
        form = dict(read_fields(request, await self._read_body(request, _LOGIN_BYTES_MAX)))
        cookie = await self._door.sign_in(form.get("key", "").strip(), request)
        target = local_path(form.get("next", "/"), "/")
        if cookie is None:
            words = {"title": "Sign in", "next": target, "wrong": True}
            return self._render(None, Page("login.html", words, status=401))
        return RedirectResponse(target, 303, headers={"set-cookie": cookie})

    async def _logout(self, request: Request) -> Response:
        request.scope[ROUTE] = "/logout"
        cookie = await self._door.sign_out(request)
        return RedirectResponse("/login", 303, headers={"set-cookie": cookie})

    def _render(self, visit: Visit | None, page: Page) -> Response:
        now_ms = time.time_ns() // 1_000_000
        values: dict[str, Any] = {
            "wrong": False,
            "now_ms": now_ms,
            "path": visit.request.scope["path"] if visit else "/login",
            "here": _here(visit),
            "may_act": bool(visit and visit.may_act),
            "who": visit.who if visit else "",
            "person": visit.caller.person if visit else "",
            "signed_in": visit is not None,
            "notice": self._notices.read(visit.query("n")) if visit else "",
            "assets": assets(),
            "has_outbox": self._has_outbox,
            "version": self._version,
        }
        text = self._templates.get_template(page.template).render(values | page.values)
        return HTMLResponse(text, page.status, {"content-security-policy": POLICY})


class _Held(Response):
    """A page whose reader keeps its place until all but the last piece was taken over."""

    def __init__(self, page: Response, place: ExitStack) -> None:
        self._page = page
        self._place = place
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        page, body = self._page, bytes(self._page.body)
        head = {"status": page.status_code, "headers": page.raw_headers}
        with self._place:
            await send({"type": "http.response.start", **head})
            for at in range(0, len(body) or 1, _PIECE):
                piece, more = body[at : at + _PIECE], at + _PIECE < len(body)
                await send({"type": "http.response.body", "body": piece, "more_body": more})


class _Streamed(Response):
    """Hands the connection over."""

    def __init__(self, serve: Callable[[Any, Any], Awaitable[None]]) -> None:
        self._serve = serve
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self._serve(receive, send)


async def _gone(request: Request) -> None:
    """Until the client has hung up."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _static(request: Request) -> Response:
    request.scope[ROUTE] = "/static"
    asset = assets().get(request.path_params["name"])
    if asset is None or asset.path != request.scope["path"]:
        return Response(status_code=404)
    headers = {"cache-control": _FOR_EVER, "content-type": asset.media}
    return Response(asset.content, headers=headers)


def _here(visit: Visit | None) -> str:
    """The address of the page without its notice, for forms that come back to it."""
    if visit is None or visit.request.method != "GET":
        return "/"
    params = [(k, v) for k, v in visit.request.query_params.multi_items() if k != "n"]
    return with_params(path_of(visit.request), **dict(params))


def _noticed(target: str, token: str) -> str:
    return f"{target}{'&' if '?' in target else '?'}n={token}"


def _templates() -> Environment:
    made = Environment(
        loader=PackageLoader("tenure.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "duration": wording.duration,
        "number": wording.number,
        "share": wording.share,
        "moment": wording.moment,
        "clock": wording.clock,
        "kind": kind_of,
    }
    made.globals |= {
        "ago": wording.ago,
        "attempt_bar": charts.attempt_bar,
        "KINDS": KINDS,
    }
    return made
