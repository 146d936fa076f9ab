"""The dashboard as routes: pages, forms, login, static files and the endpoints of /api."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import Any, Protocol

import msgspec
import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from tenure.core.endpoint import OPEN, Caller, Endpoint, Refused, Right
from tenure.core.errors import NotFound, StoreError, TenureError, UsageError
from tenure.core.job import NewJob
from tenure.core.redacting import MASK, Redaction
from tenure.core.storable import check_json
from tenure.dashboard import charts, display
from tenure.dashboard.actions import VERBS, Actions, Verb
from tenure.dashboard.api import Api, OutboxApi
from tenure.dashboard.audit import AuditLog
from tenure.dashboard.display import decode_json, job_path
from tenure.dashboard.pages import (
    Notices,
    Page,
    PageRequest,
    Pages,
    SearchLimit,
    local_path,
    path_of,
    read_fields,
    with_params,
)
from tenure.dashboard.queues import KINDS, QueueRegistry, ServedQueue, kind_of
from tenure.dashboard.search import Finder, parse
from tenure.dashboard.views import Warn, outboxes
from tenure.dashboard.watch import Live, Watch

_MEDIA = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8",
          "svg": "image/svg+xml"}  # fmt: skip
NAMES = ("app.css", "uplot.css", "htmx.js", "uplot.js", "app.js", "icon.svg")


class Asset(msgspec.Struct, frozen=True):
    """One file; `path` is where it is served."""

    name: str
    path: str
    media: str
    content: bytes


@cache
def assets() -> dict[str, Asset]:
    """All files by name."""
    folder = files("tenure.dashboard") / "static"
    return {name: _asset(name, (folder / name).read_bytes()) for name in NAMES}


def _asset(name: str, content: bytes) -> Asset:
    digest = hashlib.sha256(content).hexdigest()[:12]
    return Asset(name, f"/static/{digest}/{name}", _MEDIA[name.rpartition(".")[2]], content)


class SessionAuth(Protocol):
    """Knows keys and sessions; the dashboard knows neither."""

    async def caller(self, request: Request) -> Caller | None:
        """Who asks for this page; None for somebody who has to sign in first.

        Raises what the gateway answers to a request that comes from another site's page.
        """

    async def sign_in(self, key_text: str, request: Request) -> str | None:
        """The session that a key opens, as a Set-Cookie value; None for a key that is no good."""

    async def is_still_in(self, request: Request, caller: Caller) -> bool:
        """Whether the caller of an earlier request would be admitted now."""

    async def sign_out(self, request: Request) -> str:
        """End the session of a request; the Set-Cookie value that takes its place.

        Raises what the gateway answers to a request that comes from another site's page.
        """


_SELECTED_MAX = 500
_DONE = {
    "retry": "sent back",
    "cancel": "cancelled",
    "remove": "removed",
    "redeliver": "to be sent again",
}


class Forms:
    """All forms of a dashboard."""

    def __init__(
        self,
        street: QueueRegistry,
        finder: Finder,
        actor: Actions,
        notices: Notices,
        redaction: Redaction,
    ) -> None:
        self._street = street
        self._finder = finder
        self._actor = actor
        self._notices = notices
        self._redaction = redaction

    def handlers(self) -> dict[str, Callable[[PageRequest], Awaitable[str]]]:
        """By path."""
        return {
            "/ui/act": self.act,
            "/ui/bulk": self.bulk,
            "/ui/bulk/stop": self.bulk_stop,
            "/ui/queue": self.queue,
            "/ui/redeliver": self.redeliver,
            "/ui/submit": self.submit,
            "/ui/replay": self.replay,
        }

    async def act(self, visit: PageRequest) -> str:
        """Retry, cancel or remove the jobs that were ticked; `job` is `queue|id`."""
        verb = _verb(visit.field("verb"))
        by_queue: dict[str, list[str]] = {}
        chosen = visit.fields("job")[:_SELECTED_MAX]
        for each in chosen:
            queue, _, job_id = each.partition("|")
            by_queue.setdefault(queue, []).append(job_id)
        if not by_queue:
            raise UsageError("no job is selected: tick some first")
        answers: Counter[str] = Counter()
        for queue, job_ids in by_queue.items():
            answers.update(await self._actor.act(visit.who, verb, queue, job_ids))
        removed_itself = verb == "remove" and visit.field("gone") and answers["ok"]
        back = visit.field("gone") if removed_itself else visit.field("next")
        return self._back(back, "/jobs", _told(verb, answers))

    async def bulk(self, visit: PageRequest) -> str:
        """Begin an action on a whole search."""
        search = parse(visit.field("q"), now_ms=time.time_ns() // 1_000_000)
        bulk = await self._actor.begin(visit.who, _verb(visit.field("verb")), search)
        return f"/bulk/{bulk.id}"

    async def bulk_stop(self, visit: PageRequest) -> str:
        """Stop one."""
        bulk = await self._actor.stop(visit.who, visit.field("bulk"))
        return f"/bulk/{bulk.id}"

    async def queue(self, visit: PageRequest) -> str:
        """Pause or resume."""
        verb, name = visit.field("verb"), visit.field("queue")
        if verb not in ("pause", "resume"):
            raise UsageError(f"{verb!r} is nothing to do to a queue; there are pause and resume")
        await self._actor.steer(visit.who, "pause" if verb == "pause" else "resume", name)
        return self._back(visit.field("next"), "/queues", f"{name} is {verb}d.")

    async def redeliver(self, visit: PageRequest) -> str:
        """Send the events that were ticked again."""
        chosen = visit.fields("job")[:_SELECTED_MAX]
        if not chosen:
            raise UsageError("no event is selected: tick some first")
        answers = await self._actor.redeliver(visit.who, visit.field("queue"), chosen)
        return self._back(visit.field("next"), "/outbox", _told("redeliver", Counter(answers)))

    async def submit(self, visit: PageRequest) -> str:
        """A new job from the page."""
        queue, text = visit.field("queue"), visit.field("payload")
        job = NewJob(
            task=_task(visit),
            payload=await self._redaction.apart(len(text), lambda: _json_of(text)),
            requester=visit.caller.requester,
        )
        made = await self._actor.submit(visit.who, queue, job)
        return f"{job_path(queue, made.job_id)}?n={self._notices.leave('Submitted.')}"

    async def replay(self, visit: PageRequest) -> str:
        """The same job again as a new one, with its payload as it was edited."""
        queue, job_id = visit.field("queue"), visit.field("job_id")
        old = await self._street[queue].ledger.get(job_id)
        if old is None:
            raise NotFound("there is no such job (any more)")
        text, before = visit.field("payload"), old.payload

        def restored() -> bytes:
            edited = decode_json(_json_of(text))
            if edited == MASK:  # a large payload was masked whole
                return before
            return msgspec.json.encode(self._redaction.restored(edited, decode_json(before)))

        payload = await self._redaction.apart(len(text) + len(before), restored)
        job = NewJob(
            task=_task(visit) or old.task,
            payload=payload,
            priority=old.priority,
            max_attempts=old.max_attempts or None,
            gid=old.gid,
            requester=old.requester,
        )
        made = await self._actor.submit(visit.who, queue, job, why=f"replay {job_id}")
        return f"{job_path(queue, made.job_id)}?n={self._notices.leave(f'Replay of {job_id}.')}"

    def _back(self, text: str, default: str, notice: str) -> str:
        path = local_path(text, default)
        return f"{path}{'&' if '?' in path else '?'}n={self._notices.leave(notice)}"


def _verb(text: str) -> Verb:
    for verb in VERBS:
        if verb == text:
            return verb
    raise UsageError(f"{text!r} is no action; there are {', '.join(VERBS)}")


def _task(visit: PageRequest) -> str:
    task = visit.field("task").strip()
    if not task:
        raise UsageError("a job needs a task")
    return task


def _json_of(text: str) -> bytes:
    """The text as it stands if it is JSON: numbers are not to lose digits on the way."""
    try:
        check_json(text)
    except ValueError as error:
        raise UsageError(f"the payload {error}") from None
    return text.encode()


def _told(verb: str, answers: Counter[str]) -> str:
    done = answers.pop("ok", 0)
    parts = [f"{done} {_DONE[verb]}"] if done else []
    requested = answers.pop("requested", 0)
    if requested:
        parts.append(f"{requested} told to their workers")
    parts += [f"{count} not possible ({why})" for why, count in answers.items()]
    return ", ".join(parts) + "."


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
_LOGIN_BYTES_MAX = 8_192
_FOR_EVER = "public, max-age=31536000, immutable"


async def _none() -> list[Warn]:
    return []


class Dashboard:
    """One per gateway process. Call `close` in its event loop."""

    def __init__(
        self,
        houses: Iterable[ServedQueue],
        door: SessionAuth,
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
        street = QueueRegistry(houses)
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
        self.actor = Actions(street, finder, audit)
        self.searches = SearchLimit()
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
        shown: dict[str, Callable[[PageRequest], Coroutine[Any, Any, Page]]] = {
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

    def _page(self, path: str, handle: Callable[[PageRequest], Coroutine[Any, Any, Page]]) -> Any:
        async def endpoint(request: Request) -> Response:
            request.scope[ROUTE] = path
            visit: PageRequest | None = None
            try:
                admitted = await self._visit(request, RIGHTS[path])
                if isinstance(admitted, Response):
                    return admitted
                visit = admitted
                self.watch.touch()
                gone = partial(_gone, request)
                page = await self.searches.run(visit.who, gone, handle(visit))
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

    def _form(self, path: str, act: Callable[[PageRequest], Awaitable[str]]) -> Any:
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

    async def _visit(self, request: Request, right: Right) -> PageRequest | Response:
        caller = await self._door.caller(request)
        if caller is None:
            query = request.scope["query_string"].decode("latin-1")
            here = path_of(request) + (f"?{query}" if query else "")
            back = here if request.method == "GET" else "/"
            return RedirectResponse(with_params("/login", next=back), 303)
        visit = PageRequest(request, caller)
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
        self.watch.touch()
        queue = str(request.query_params.get("queue", ""))
        known = queue if queue in self.watch.observers else ""

        def is_still_in() -> Awaitable[bool]:
            return self._door.is_still_in(request, caller)

        return _Streamed(lambda receive, send: self.live.serve(known, receive, send, is_still_in))

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

    def _render(self, visit: PageRequest | None, page: Page) -> Response:
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


def _here(visit: PageRequest | None) -> str:
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
        "duration": display.duration,
        "number": display.number,
        "share": display.share,
        "moment": display.moment,
        "clock": display.clock,
        "kind": kind_of,
    }
    made.globals |= {
        "ago": display.ago,
        "attempt_bar": charts.attempt_bar,
        "KINDS": KINDS,
    }
    return made
