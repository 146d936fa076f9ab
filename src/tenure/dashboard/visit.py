"""One request for a page: who asks, what for, and the notice that an earlier action left."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from starlette.requests import ClientDisconnect, Request

from tenure.core.endpoint import Caller, Refused
from tenure.core.errors import UsageError

_FIELDS_MAX = 1_000
_NOTICES_MAX = 500
_AT_ONCE_MAX = 8
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Visit:
    """A request that was admitted. `form` holds what was posted, in order."""

    request: Request
    caller: Caller
    form: tuple[tuple[str, str], ...] = ()

    @property
    def may_act(self) -> bool:
        """Whether the pages show buttons, and the buttons do something."""
        return self.caller.may("admin")

    @property
    def who(self) -> str:
        """For the audit log."""
        return self.caller.who

    def field(self, name: str, default: str = "") -> str:
        """The last posted value of a field."""
        return dict(self.form).get(name, default)

    def fields(self, name: str) -> list[str]:
        """All posted values of a field."""
        return [value for key, value in self.form if key == name]

    def query(self, name: str, default: str = "") -> str:
        """A parameter of the URL."""
        return str(self.request.query_params.get(name, default))


def read_fields(request: Request, body: bytes) -> tuple[tuple[str, str], ...]:
    """The fields of a posted form; only the kind that needs no parser of its own."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/x-www-form-urlencoded":
        raise UsageError("a form is sent as application/x-www-form-urlencoded")
    try:
        text = body.decode(errors="replace")
        return tuple(parse_qsl(text, keep_blank_values=True, max_num_fields=_FIELDS_MAX))
    except ValueError:
        raise UsageError(f"a form has at most {_FIELDS_MAX} fields") from None


def path_of(request: Request) -> str:
    """The path as it was sent, whatever the Host header says."""
    return str(request.scope.get("raw_path", b"/").decode("latin-1"))


class Searches:
    """Requests that look at many jobs: some at once for each key, and none without its client."""

    def __init__(self) -> None:
        self.at_work: Counter[str] = Counter()

    async def run(
        self, who: str, gone: Callable[[], Awaitable[None]] | None, work: Coroutine[Any, Any, _T]
    ) -> _T:
        """The result of the work, which is cancelled when the client hangs up."""
        try:
            with self.place(who):
                return await self.attended(gone, work)
        finally:
            work.close()

    @contextmanager
    def place(self, who: str) -> Iterator[None]:
        """One of the places of a key, or `Refused`."""
        if self.at_work[who] >= _AT_ONCE_MAX:
            raise Refused(
                "too_many_searches",
                f"this key has {_AT_ONCE_MAX} searches at work: wait for their answers",
            )
        self.at_work[who] += 1
        try:
            yield
        finally:
            self.at_work[who] -= 1
            if not self.at_work[who]:
                del self.at_work[who]

    async def attended(
        self, gone: Callable[[], Awaitable[None]] | None, work: Coroutine[Any, Any, _T]
    ) -> _T:
        """The result of the work, for a caller that has a place."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(gone()) if gone else asyncio.Future[None]()
        try:
            await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


class Notices:
    """What an action has to say on the page after it, kept until it is read or crowded out."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()

    def leave(self, text: str) -> str:
        """Keep a text; the answer goes into the URL as `n`."""
        token = secrets.token_urlsafe(6)
        self._texts[token] = text
        if len(self._texts) > _NOTICES_MAX:
            self._texts.popitem(last=False)
        return token

    def read(self, token: str) -> str:
        """The text, once."""
        return self._texts.pop(token, "") if token else ""


def with_params(path: str, **params: Any) -> str:
    """A local address with parameters, those left out that are empty."""
    kept = {name: value for name, value in params.items() if value not in ("", None)}
    return f"{path}?{urlencode(kept)}" if kept else path


def local_path(text: str, default: str) -> str:
    """An address to go back to, if it is one of ours."""
    ours = text.startswith("/") and not text.startswith(("//", "/\\")) and "\n" not in text
    return text if ours else default
