"""The routes of the dashboard: pages, forms, login, static files and the endpoints of /api.

Without a session, pages redirect to /login. Forms need the scope `admin`.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from typing import Any, Protocol, TypeAlias
from urllib.parse import parse_qsl, unquote

import msgspec
import structlog
from jinja2 import Environment, PackageLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from tenure.core.encoding import check_json
from tenure.core.endpoint import OPEN, Caller, Endpoint, Refused, Right
from tenure.core.errors import NotFound, StoreError, TenureError, UsageError
from tenure.core.job import NewJob
from tenure.core.redaction import MASK, Redaction
from tenure.dashboard import display
from tenure.dashboard.actions import VERBS, Actions, Verb
from tenure.dashboard.api import (
    Api,
    SearchLimit,
    run_while_connected,
    until_disconnected,
)
from tenure.dashboard.audit import AuditLog
from tenure.dashboard.finder import JobFinder
from tenure.dashboard.pages import Page, PageHandler, PageRequest, Pages, base_of, with_params
from tenure.dashboard.queues import OpenQueue, QueueRegistry
from tenure.dashboard.search import parse_now
from tenure.dashboard.views import QueueWarning, outboxes
from tenure.dashboard.watch import JournalWatch, LiveStreams

_log = structlog.get_logger("tenure.dashboard")

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_READ = Right("observe", "all")
_SIGN_IN = Right("", "none", does="sign in, out", audit="never")

_STORE_AWAY = {
    "title": "The store does not answer",
    "text": "This page reloads when the store answers. To find the cause: tenure doctor",
}
_AWAY_LOG_S = 60.0
_CHUNK_BYTES = 1 << 16
_LOGIN_BYTES_MAX = 8_192
_FIELDS_MAX = 1_000
_NOTICES_MAX = 500
_SELECTED_MAX = 500
_DONE = {
    "retry": "sent back",
    "cancel": "cancelled",
    "remove": "removed",
    "redeliver": "to be sent again",
}
_STREAM_HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
_CACHE_FOR_EVER = "public, max-age=31536000, immutable"
_MEDIA = {
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FormHandler: TypeAlias = Callable[[PageRequest], Awaitable[str]]
_ASSETS = ("app.css", "uplot.css", "htmx.js", "uplot.js", "app.js", "icon.svg")


class SessionAuth(Protocol):
    """Authentication by keys and sessions; the gateway implements it.

    Every method raises a problem for a request that a page of another site sent.
    """

    async def caller(self, request: Request) -> Caller | None:
        """The caller of a page; None for a caller who has to sign in first."""

    async def sign_in(self, key_text: str, request: Request) -> str | None:
        """The Set-Cookie value of a new session; None for a wrong key."""

    async def is_still_valid(self, request: Request, caller: Caller) -> bool:
        """Whether the caller of an earlier request would be admitted now."""

    async def sign_out(self, request: Request) -> str:
        """End the session of a request; returns the Set-Cookie value that removes it."""


class Asset(msgspec.Struct, frozen=True):
    """A static file. Its path contains the hash of its content, so browsers may cache it."""

    path: str
    media: str
    content: bytes


@cache
def assets() -> dict[str, Asset]:
    """The static files by name."""
    folder = files("tenure.dashboard") / "static"
    found = {}
    for name in _ASSETS:
        content = (folder / name).read_bytes()
        digest = hashlib.sha256(content).hexdigest()[:12]
        media = _MEDIA[name.rpartition(".")[2]]
        found[name] = Asset(f"/static/{digest}/{name}", media, content)
    return found


@cache
def templates() -> Environment:
    """The Jinja environment of the pages."""
    environment = Environment(
        loader=PackageLoader("tenure.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("duration", "number", "share", "moment", "clock"):
        environment.filters[name] = getattr(display, name)
    environment.globals["ago"] = display.ago
    return environment


async def _no_warnings() -> list[QueueWarning]:
    return []


class Dashboard:
    """The dashboard of one gateway process. Call `close` in its event loop."""

    def __init__(
        self,
        open_queues: Iterable[OpenQueue],
        auth: SessionAuth,
        audit: AuditLog,
        *,
        redact: Iterable[str] = (),
        trace_url: str = "",
        lake: str = "",
        version: str = "",
        store_warnings: Callable[[], Awaitable[list[QueueWarning]]] = _no_warnings,
        read_body: Callable[[Request, int], Awaitable[bytes]],
        form_bytes_max: int,
    ) -> None:
        queues = QueueRegistry(open_queues)
        redaction = Redaction(redact)
        finder = JobFinder(queues, redaction)
        self._auth = auth
        self._has_outbox = bool(outboxes(queues))
        self._version = version
        self._read_body = read_body
        self._form_bytes_max = form_bytes_max
        self._notices = _Notices()
        self._away_logged_s: dict[str, float] = {}
        self.searches = SearchLimit()
        self.watch = JournalWatch(queues)
        self._live = LiveStreams(self.watch)
        self.actions = Actions(queues, finder, audit)
        self._api = Api(queues, finder, self.actions, self.watch, redaction)
        self._pages = Pages(
            queues,
            finder,
            self.actions,
            self.watch,
            redaction,
            trace_url=trace_url,
            lake=lake,
            store_warnings=store_warnings,
        )
        self._forms = _Forms(queues, self.actions, self._notices, redaction)
        self.declared = self._declare_routes()

    def endpoints(self) -> list[Endpoint]:
        """The endpoints of /api."""
        return self._api.endpoints()

    def drain(self) -> None:
        """End the event streams of the pages."""
        self._live.drain()

    async def close(self) -> None:
        """Stop bulk actions, observers and event streams."""
        self._live.drain()
        await self.actions.close()
        await self.watch.close()

    def routes(self) -> list[Route]:
        """Pages, forms and static files."""
        return [route for route, _ in self.declared]

    def _declare_routes(self) -> list[tuple[Route, Right]]:
        """Each route with the right that it requires."""
        pages = [
            (Route(path, self._page(path, handle)), _READ)
            for path, handle in self._pages.handlers().items()
        ]
        forms = []
        for path, (does, act) in self._forms.handlers().items():
            right = Right("admin", "all", does=does, audit="handler")
            forms.append((Route(path, self._form(act, right), methods=["POST"]), right))
        return [
            (Route("/live", self._serve_live), _READ),
            (Route("/login", self._login, methods=["GET", "POST"]), _SIGN_IN),
            (Route("/logout", self._logout, methods=["POST"]), _SIGN_IN),
            (Route("/static/{digest}/{name}", _static), OPEN),
            *pages,
            *forms,
        ]

    def _page(self, path: str, handle: PageHandler) -> Any:
        async def endpoint(request: Request) -> Response:
            with ExitStack() as slot:
                return _HeldResponse(await render(request, slot), slot.pop_all())

        async def render(request: Request, slot: ExitStack) -> Response:
            admitted: PageRequest | None = None
            try:
                found = await self._admit(request, _READ)
                if isinstance(found, Response):
                    return found
                admitted = found
                self.watch.touch()
                slot.enter_context(self.searches.slot(admitted.who))
                gone = partial(until_disconnected, request.receive)
                page = await run_while_connected(handle(admitted), gone)
            except NotFound as error:
                page = _problem(404, "Not found", str(error))
            except StoreError as error:
                self._log_away(path, error)
                page = _problem(503, **_STORE_AWAY)
            except TenureError as error:
                page = _problem(
                    429 if isinstance(error, Refused) else 409, "Not possible", str(error)
                )
            return self._render(request, admitted, page)

        return endpoint

    def _log_away(self, path: str, error: StoreError) -> None:
        """Log at most once a minute per page: anyone may ask for one, and pages reload."""
        now_s = time.monotonic()
        if now_s - self._away_logged_s.get(path, -_AWAY_LOG_S) >= _AWAY_LOG_S:
            self._away_logged_s[path] = now_s
            _log.warning("page_store_away", path=path, error=str(error))

    def _form(self, act: _FormHandler, right: Right) -> Any:
        async def endpoint(request: Request) -> Response:
            admitted = await self._admit(request, right)
            if isinstance(admitted, Response):
                return admitted
            body = await self._read_body(request, self._form_bytes_max)
            # In a thread: parsing a large form would delay other requests.
            form = await asyncio.to_thread(_read_fields, request, body)
            try:
                target = await act(replace(admitted, form=form))
            except TenureError as error:
                back = local_path(dict(form).get("next", ""), admitted.base + "/")
                target = self._notices.leave(back, f"Not done: {error}")
            return RedirectResponse(target, 303)

        return endpoint

    async def _admit(self, request: Request, right: Right) -> PageRequest | Response:
        caller = await self._auth.caller(request)
        if caller is None:
            query = request.scope["query_string"].decode("latin-1")
            here = _path_of(request) + (f"?{query}" if query else "")
            base = base_of(request)
            back = here if request.method == "GET" else f"{base}/"
            return RedirectResponse(with_params(f"{base}/login", next=back), 303)
        admitted = PageRequest(request, caller)
        refusal = right.refusal(caller)
        if refusal:
            return self._render(request, admitted, _problem(403, "Not for this key", refusal))
        return admitted

    async def _serve_live(self, request: Request) -> Response:
        caller = await self._auth.caller(request)
        if caller is None:
            return Response(status_code=401)
        if _READ.refusal(caller):
            return Response(status_code=403)
        if self._live.is_full:
            return Response(status_code=503, headers={"retry-after": "1"})
        if self._live.is_full_of(caller.who):
            return Response(status_code=429, headers={"retry-after": "1"})
        self.watch.touch()
        queue = str(request.query_params.get("queue", ""))
        known = queue if queue in self.watch.observers else ""
        is_still_valid = partial(self._auth.is_still_valid, request, caller)
        frames = self._live.frames(known, is_still_valid, who=caller.who)
        return StreamingResponse(frames, headers=_STREAM_HEADERS, media_type="text/event-stream")

    async def _login(self, request: Request) -> Response:
        home = base_of(request) + "/"
        if request.method == "GET":
            back = local_path(str(request.query_params.get("next", "")), home)
            page = Page("login.html", {"title": "Sign in", "next": back})
            return self._render(request, None, page)
        form = dict(_read_fields(request, await self._read_body(request, _LOGIN_BYTES_MAX)))
        cookie = await self._auth.sign_in(form.get("key", "").strip(), request)
        target = local_path(form.get("next", ""), home)
        if cookie is None:
            values = {"title": "Sign in", "next": target, "wrong": True}
            return self._render(request, None, Page("login.html", values, status=401))
        return RedirectResponse(target, 303, headers={"set-cookie": cookie})

    async def _logout(self, request: Request) -> Response:
        cookie = await self._auth.sign_out(request)
        return RedirectResponse(f"{base_of(request)}/login", 303, headers={"set-cookie": cookie})

    def _render(self, request: Request, admitted: PageRequest | None, page: Page) -> Response:
        base = base_of(request)
        values: dict[str, Any] = {
            "base": base,
            "wrong": False,
            "now_ms": display.now_ms(),
            "path": request.scope["path"].removeprefix(unquote(base)),
            "here": _here(admitted),
            "may_act": bool(admitted and admitted.may_act),
            "who": admitted.who if admitted else "",
            "person": admitted.caller.person if admitted else "",
            "signed_in": admitted is not None,
            "notice": self._notices.read(admitted.query("n")) if admitted else "",
            "assets": assets(),
            "has_outbox": self._has_outbox,
            "version": self._version,
        }
        text = templates().get_template(page.template).render(values | page.values)
        return HTMLResponse(text, page.status, {"content-security-policy": _POLICY})


class _HeldResponse(Response):
    """A page that keeps its search slot until all but the last chunk has been sent."""

    def __init__(self, page: Response, slot: ExitStack) -> None:
        self._page = page
        self._slot = slot
        self.background = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        page, body = self._page, bytes(self._page.body)
        head = {"status": page.status_code, "headers": page.raw_headers}
        with self._slot:
            await send({"type": "http.response.start", **head})
            for at in range(0, len(body) or 1, _CHUNK_BYTES):
                chunk, more = body[at : at + _CHUNK_BYTES], at + _CHUNK_BYTES < len(body)
                await send({"type": "http.response.body", "body": chunk, "more_body": more})


async def _static(request: Request) -> Response:
    asset = assets().get(request.path_params["name"])
    if asset is None or asset.path != "/static/{digest}/{name}".format(**request.path_params):
        return Response(status_code=404)
    headers = {"cache-control": _CACHE_FOR_EVER, "content-type": asset.media}
    return Response(asset.content, headers=headers)


def _problem(status: int, title: str, text: str) -> Page:
    return Page("problem.html", {"title": title, "text": text}, status=status)


def _here(admitted: PageRequest | None) -> str:
    """The address of the page without its notice, for forms that return to it."""
    if admitted is None:
        return "/"
    if admitted.request.method != "GET":
        return f"{admitted.base}/"
    params = {k: v for k, v in admitted.request.query_params.multi_items() if k != "n"}
    return with_params(_path_of(admitted.request), **params)


def _path_of(request: Request) -> str:
    """The path as the client sent it, independent of the Host header."""
    path = str(request.scope.get("raw_path", b"/").decode("latin-1"))
    root = request.scope.get("root_path", "")
    return path if path.startswith(root) else root + path  # a proxy may strip the root path


def local_path(text: str, default: str) -> str:
    """The address to return to, if it is a local path."""
    ours = text.startswith("/") and not text.startswith(("//", "/\\")) and "\n" not in text
    return text if ours else default


def _read_fields(request: Request, body: bytes) -> tuple[tuple[str, str], ...]:
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-www-form-urlencoded":
        raise UsageError("a form is sent as application/x-www-form-urlencoded")
    try:
        text = body.decode(errors="replace")
        return tuple(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise UsageError(f"a form has at most {_FIELDS_MAX} fields") from None


class _Notices:
    """Messages for the next page after an action; each is read once. The oldest are dropped."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()

    def leave(self, path: str, text: str) -> str:
        """Keep a text; returns the path with the parameter `n` by which the page finds it."""
        token = secrets.token_urlsafe(6)
        self._texts[token] = text
        if len(self._texts) > _NOTICES_MAX:
            self._texts.popitem(last=False)
        return f"{path}{'&' if '?' in path else '?'}n={token}"

    def read(self, token: str) -> str:
        return self._texts.pop(token, "") if token else ""


class _Forms:
    """The handlers of forms. Each acts and returns the address of the next page."""

    def __init__(
        self, queues: QueueRegistry, actions: Actions, notices: _Notices, redaction: Redaction
    ) -> None:
        self._queues = queues
        self._actions = actions
        self._notices = notices
        self._redaction = redaction

    def handlers(self) -> dict[str, tuple[str, _FormHandler]]:
        """By path: the name of the action in the audit log, and the handler."""
        return {
            "/ui/act": ("VERB", self._act),
            "/ui/bulk": ("VERB all", self._bulk),
            "/ui/bulk/stop": ("stop VERB all", self._bulk_stop),
            "/ui/queue": ("pause or resume", self._queue),
            "/ui/redeliver": ("redeliver", self._redeliver),
            "/ui/submit": ("submit", self._submit),
            "/ui/replay": ("replay JOB", self._replay),
        }

    async def _act(self, request: PageRequest) -> str:
        """Retry, cancel or remove the selected jobs; `job` is `queue|id`."""
        verb = _verb(request.field("verb"))
        by_queue: dict[str, list[str]] = {}
        for each in request.fields("job")[:_SELECTED_MAX]:
            queue, _, job_id = each.partition("|")
            by_queue.setdefault(queue, []).append(job_id)
        if not by_queue:
            raise UsageError("no job is selected: tick some first")
        answers: Counter[str] = Counter()
        for queue, job_ids in by_queue.items():
            answers.update(await self._actions.act(request.who, verb, queue, job_ids))
        removed_itself = verb == "remove" and request.field("gone") and answers["ok"]
        back = request.field("gone") if removed_itself else request.field("next")
        return self._notices.leave(
            local_path(back, f"{request.base}/jobs"), _summary(verb, answers)
        )

    async def _bulk(self, request: PageRequest) -> str:
        search, verb = parse_now(request.field("q")), _verb(request.field("verb"))
        bulk = await self._actions.begin(request.who, verb, search)
        return f"{request.base}/bulk/{bulk.id}"

    async def _bulk_stop(self, request: PageRequest) -> str:
        bulk = await self._actions.stop(request.who, request.field("bulk"))
        return f"{request.base}/bulk/{bulk.id}"

    async def _queue(self, request: PageRequest) -> str:
        verb, name = request.field("verb"), request.field("queue")
        if verb not in ("pause", "resume"):
            raise UsageError(
                f"{verb!r} is not an action on a queue; the actions are pause and resume"
            )
        await self._actions.steer(request.who, "pause" if verb == "pause" else "resume", name)
        back = local_path(request.field("next"), f"{request.base}/queues")
        return self._notices.leave(back, f"{name} is {verb}d.")

    async def _redeliver(self, request: PageRequest) -> str:
        chosen = request.fields("job")[:_SELECTED_MAX]
        if not chosen:
            raise UsageError("no event is selected: tick some first")
        answers = await self._actions.redeliver(request.who, request.field("queue"), chosen)
        back = local_path(request.field("next"), f"{request.base}/outbox")
        return self._notices.leave(back, _summary("redeliver", Counter(answers)))

    async def _submit(self, request: PageRequest) -> str:
        queue, text = request.field("queue"), request.field("payload")
        job = NewJob(
            task=_task(request),
            payload=await self._redaction.in_thread_if_large(len(text), lambda: _json_of(text)),
            requester=request.caller.requester,
        )
        submitted = await self._actions.submit(request.who, queue, job)
        path = request.base + display.job_path(queue, submitted.job_id)
        return self._notices.leave(path, "Submitted.")

    async def _replay(self, request: PageRequest) -> str:
        """Submit a copy of a job with the edited payload."""
        queue, job_id = request.field("queue"), request.field("job_id")
        old = await self._queues[queue].ledger.get(job_id)
        if old is None:
            raise NotFound("there is no such job (any more)")
        text, before = request.field("payload"), old.payload

        def restored() -> bytes:
            edited = display.decode_json(_json_of(text))
            if edited == MASK:  # a large payload is masked as a whole
                return before
            original = display.decode_json(before)
            return msgspec.json.encode(self._redaction.restored(edited, original))

        job = NewJob(
            task=_task(request),
            payload=await self._redaction.in_thread_if_large(len(text) + len(before), restored),
            priority=old.priority,
            max_attempts=old.max_attempts or None,
            gid=old.gid,
            requester=old.requester,
        )
        submitted = await self._actions.submit(request.who, queue, job, why=f"replay {job_id}")
        path = request.base + display.job_path(queue, submitted.job_id)
        return self._notices.leave(path, f"Replay of {job_id}.")


def _verb(text: str) -> Verb:
    for verb in VERBS:
        if verb == text:
            return verb
    raise UsageError(f"{text!r} is not an action; the actions are {', '.join(VERBS)}")


def _task(request: PageRequest) -> str:
    task = request.field("task").strip()
    if not task:
        raise UsageError("a job needs a task")
    return task


def _json_of(text: str) -> bytes:
    """The text unchanged if it is JSON: decoding could lose digits of numbers."""
    try:
        check_json(text)
    except ValueError as error:
        raise UsageError(f"the payload {error}") from None
    return text.encode()


def _summary(verb: str, answers: Counter[str]) -> str:
    done, requested = answers.pop("ok", 0), answers.pop("requested", 0)
    parts = [f"{done} {_DONE[verb]}"] if done else []
    parts += [f"{requested} sent to their workers"] if requested else []
    parts += [f"{count} not possible ({why})" for why, count in answers.items()]
    return ", ".join(parts) + "."
