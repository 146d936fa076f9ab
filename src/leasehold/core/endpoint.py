"""An HTTP operation as data: a contract says what it means, the gateway serves it.

A contract's `routes.py` knows paths, shapes and meaning and no web framework; the gateway knows
HTTP. It admits the caller, reads and checks the body, calls `handle` and turns the answer, or any
error of `core.errors`, into a response. The API document is made from the same data.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeAlias, get_args

import msgspec

from leasehold.core.errors import UsageError

Scope = Literal["jobs:write", "jobs:read", "jobs:cancel", "jobs:work", "observe", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
STREAM_SCOPE = "stream:"
"""A key with scopes of this kind, such as `stream:mail`, is good for these streams alone."""


class Caller(msgspec.Struct, frozen=True):
    """Who is asking. `requester` is the id of the API key, "" for the anonymous local caller.

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
        """Whether the caller holds this scope; an admin holds all, an observer may read."""
        if not scope or scope in self.scopes or "admin" in self.scopes:
            return True
        return scope == "jobs:read" and "observe" in self.scopes

    def may_see(self, requester: str) -> bool:
        """Whether a job of this requester exists for the caller."""
        return requester == self.requester or not self.scopes.isdisjoint(("admin", "observe"))


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, admitted and decoded: `body` is of the endpoint's `takes`, `query` of `asks`.

    `gone` returns when the client hung up: for handlers that make it wait.
    """

    caller: Caller
    path: Mapping[str, str] = {}
    query: Any = None
    body: Any = None
    headers: Mapping[str, str] = {}
    gone: Callable[[], Awaitable[None]] | None = None


class Answer(msgspec.Struct, frozen=True):
    """What to answer: `body` is encoded as JSON; None sends none."""

    status: int
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()


class Follow(msgspec.Struct, frozen=True):
    """Answer with the job's events as they happen, beginning after `after` ("" for all)."""

    job_id: str
    state: str
    after: str = ""


class Reply(msgspec.Struct, frozen=True):
    """One way an endpoint answers, for the API document; `also` names media of the same in text."""

    description: str
    shape: Any = None
    media: str = "application/json"
    also: tuple[str, ...] = ()
    headers: Mapping[str, str] = {}


class Refused(UsageError):
    """A request that cannot be served as it stands; `code` names the gateway's problem for it."""

    def __init__(self, code: str, message: str, *, field: str = "") -> None:
        super().__init__(message, reply=field)
        self.code = code


Handle: TypeAlias = Callable[[Call], Awaitable[Answer | Follow]]


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One method of one path. `scope` "" is open to everyone.

    `takes` is the type of the JSON body, `asks` the type of the query parameters, `reads` the
    request headers the handler looks at (name to annotated type), `problems` the statuses that can
    be answered besides those every endpoint has, `bytes_max` the largest body where the gateway's
    own limit is too small.
    """

    method: str
    path: str
    operation: str
    summary: str
    handle: Handle
    replies: Mapping[int, Reply]
    scope: Scope | Literal[""] = ""
    description: str = ""
    takes: Any = None
    example: Any = None
    asks: Any = None
    reads: Mapping[str, Any] = {}
    problems: tuple[int, ...] = ()
    tag: str = "jobs"
    bytes_max: int = 0
