"""HTTP operations as data: contracts declare them, the gateway serves them.

A contract's `routes.py` has paths, types and handlers and knows no web framework. The gateway
authenticates the caller, reads and checks the body, calls `handle` and turns the answer, or any
error of `core.errors`, into a response. The API document is made from the same data.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import lru_cache
from typing import Annotated, Any, Literal, Protocol, TypeAlias, get_args

import msgspec
from msgspec import Meta

from tenure.core.errors import Conflict, InvalidJob, QueueFull, UsageError
from tenure.core.job import NewJob, Submitted, check_key

Scope = Literal[
    "jobs:write", "jobs:read", "jobs:cancel", "jobs:work", "metrics", "observe", "admin"
]
SCOPES: tuple[Scope, ...] = get_args(Scope)
STREAM_SCOPE = "stream:"
"""A key with such scopes, for example `stream:mail`, may use only the streams they name."""

_OBSERVED = ("jobs:read", "metrics")


class Caller(msgspec.Struct, frozen=True):
    """The caller of a request. `requester` is the id of its API key, "" for the anonymous caller.

    `person` is the name of a person who signed in at a proxy that the gateway trusts.
    """

    requester: str = ""
    scopes: frozenset[str] = frozenset()
    person: str = ""

    @property
    def who(self) -> str:
        """For the audit log: the person, else the key."""
        return f"sso:{self.person}" if self.person else self.requester

    def may(self, scope: str) -> bool:
        """Whether the caller has this scope; an admin has all, an observer those that read."""
        if not scope or scope in self.scopes or "admin" in self.scopes:
            return True
        return scope in _OBSERVED and "observe" in self.scopes

    def may_read(self, owner: str) -> bool:
        """Whether the caller may see objects of this owner: its own, or all for an observer."""
        return self.may_act(owner) or "observe" in self.scopes

    def may_act(self, owner: str) -> bool:
        """Whether the caller may change objects of this owner: its own, or all for an admin."""
        return owner == self.requester or "admin" in self.scopes

    def owns(self, requester: str) -> bool:
        """Whether the caller is this requester, who alone sees a job without masks."""
        return requester == self.requester

    @property
    def streams(self) -> frozenset[str]:
        """The streams that the key is limited to; empty means all."""
        return _streams(self.scopes)


@lru_cache(maxsize=1024)
def _streams(scopes: frozenset[str]) -> frozenset[str]:
    return frozenset(
        scope.removeprefix(STREAM_SCOPE) for scope in scopes if scope.startswith(STREAM_SCOPE)
    )


Whose = Literal["none", "own", "leased", "all"]
Audit = Literal["call", "handler", "others", "history", "never"]


class Right(msgspec.Struct, frozen=True):
    """What a route requires of its caller, and whose objects it touches. Every route declares one.

    `scope` is the scope of the key, "" for a route that is open to everyone. `whose` is `own` for
    objects of the caller (an admin reaches those of all, an observer where the route reads),
    `leased` for jobs under a lease that the caller proves, `all` for objects of every tenant and
    the gateway itself, `none` where no tenant's object is touched.

    `does` names the change in the audit log; a route without it only reads. `audit` says who
    writes the entry: the gateway for each `call`, or only for calls on objects of `others`, or the
    `handler` itself. `history`: the change is in the history of the job; `never`: it changes no
    job, queue or credential.

    `streams`: the route checks the streams that a key is limited to. Every other route with a scope
    refuses such keys.
    """

    scope: Scope | Literal[""]
    whose: Whose
    does: str = ""
    audit: Audit = "call"
    streams: bool = False

    def refusal(self, caller: Caller) -> str:
        """Why this caller may not use the route, "" if it may."""
        if not caller.may(self.scope):
            return f"this needs a key with the scope {self.scope}"
        if self.scope and not self.streams and caller.streams:
            return f"this key is good for the streams {', '.join(sorted(caller.streams))} alone"
        return ""


OPEN = Right("", "none")


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One authenticated, decoded request: `body` has the type `takes`, `query` the type `asks`.

    `right` is the endpoint's. `touched` collects the objects that the call changed, as (owner, id).
    `gone` returns when the client has disconnected, and `is_allowed` says whether the caller would
    be admitted now: both are for handlers that let it wait.
    """

    caller: Caller
    right: Right = OPEN
    path: Mapping[str, str] = {}
    query: Any = None
    body: Any = None
    headers: Mapping[str, str] = {}
    gone: Callable[[], Awaitable[None]] | None = None
    is_allowed: Callable[[], Awaitable[bool]] | None = None
    touched: list[tuple[str, str]] = msgspec.field(default_factory=list)

    @property
    def reach(self) -> str | None:
        """The owner whose objects a list may show to the caller; None: those of all owners."""
        everyone = not self.caller.scopes.isdisjoint(("admin", "observe"))
        return None if everyone else self.caller.requester

    def reaches(self, owner: str, object_id: str = "") -> bool:
        """Whether the caller may do what this route does to an object of this owner."""
        if not self.right.does:
            return self.caller.may_read(owner)
        if not self.caller.may_act(owner):
            return False
        self.touched.append((owner, object_id))
        return True


class Answer(msgspec.Struct, frozen=True):
    """A response: `body` is encoded as JSON; None sends none.

    `only_reads`: nothing was changed, although the route is one that acts.
    """

    status: int
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()
    only_reads: bool = False


class Follow(msgspec.Struct, frozen=True):
    """A response that streams the job's events as they happen, from after `after` ("" for all).

    `masked` is for callers who are not the job's requester. `origin` is that of the job, if its
    requester chose the id: the stream ends when another job has that id.
    """

    job_id: str
    state: str
    after: str = ""
    masked: bool = False
    origin: tuple[str, int] | None = None


STREAM = "text/event-stream"


class Reply(msgspec.Struct, frozen=True):
    """One response of an endpoint, for the API document; `also` are further media types of it."""

    description: str
    shape: Any = None
    media: str = "application/json"
    also: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}


class Refused(UsageError):
    """A request that is refused; `code` names the gateway's problem for it."""

    def __init__(self, code: str, message: str, *, field: str = "") -> None:
        super().__init__(message, reply=field)
        self.code = code


Handle: TypeAlias = Callable[[Call], Coroutine[Any, Any, Answer | Follow]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. `right` is what the caller needs for it.

    `takes` is the type of the JSON body, `asks` the type of the query parameters, `reads` the
    request headers the handler looks at (name to annotated type), `problems` the statuses that can
    be answered besides those every endpoint has, `bytes_max` the largest body where the gateway's
    own limit is too small. `is_search`: it only reads, and its cost grows with the number of stored
    objects, so a key may run few of them at a time, and each ends when its client disconnects.
    """

    method: str
    path: str
    operation: str
    summary: str
    handle: Handle
    replies: Mapping[int, Reply]
    right: Right
    description: str = ""
    takes: Any = None
    example: Any = None
    asks: Any = None
    reads: Mapping[str, Any] = {}
    problems: tuple[int, ...] = ()
    tag: str = "jobs"
    bytes_max: int = 0
    is_search: bool = False


_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

IdempotencyKey = Annotated[
    str,
    Meta(
        pattern=r"^[!-~]([ -~]{0,253}[!-~])?$",
        description="The same key and request answer with the same job, another is a conflict.",
    ),
]
TraceParent = Annotated[
    str, Meta(description="W3C trace context, handed to the worker with the job.")
]


class Submits(Protocol):
    """What endpoints that submit need of the queue."""

    async def submit(self, jobs: Sequence[NewJob]) -> list[Submitted]:
        """Store jobs, or say why not."""


def idempotency_key(headers: Mapping[str, str]) -> str:
    """The caller's key, "" for none."""
    key = headers.get("idempotency-key")
    if key is None:
        return ""
    try:
        check_key(key)
    except UsageError as error:
        raise Refused("bad_idempotency_key", str(error)) from None
    return key


def trace_context(headers: Mapping[str, str]) -> str:
    """The trace context; a malformed header is ignored, as its standard requires."""
    trace = headers.get("traceparent", "")
    return trace if trace and _TRACEPARENT.fullmatch(trace) else ""


def check_stored(submitted: Submitted) -> None:
    """Raise the error for a job that was not stored."""
    match submitted.status:
        case "conflict":
            raise Conflict(submitted.reason)
        case "full":
            raise QueueFull(submitted.reason, retry_after_ms=submitted.retry_after_ms or 1000)
        case "invalid":
            raise InvalidJob(submitted.reason)
