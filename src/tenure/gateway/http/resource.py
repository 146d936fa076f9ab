"""One path as an ASGI application: authenticate, limit, read the body, call the handler, answer.

It is called without a web framework, for speed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from tenure.core.encoding import INTEGER_MAX
from tenure.core.endpoint import STREAM, Answer, Call, Caller, Endpoint, Follow
from tenure.core.errors import ReplyLost
from tenure.dashboard.api import BASE, ROUTE, SearchLimit, until_disconnected
from tenure.dashboard.audit import IDS_MAX, LOST, AuditLog
from tenure.gateway.auth import Auth, headers_of
from tenure.gateway.feed import Feed
from tenure.gateway.http.body import (
    LARGE,
    BodyBudget,
    HeldBody,
    check_media,
    decode,
    decode_large,
    invalid,
    read_body,
)
from tenure.gateway.limits import Quota, RateLimit
from tenure.gateway.problems import Problem
from tenure.gateway.settings import GatewaySettings
from tenure.gateway.sse import Streamer

_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?")
_log = structlog.get_logger("tenure.audit")

_LARGE_ANSWER = 1 << 20
_CHUNK_BYTES = 1 << 16
_JSON = b"application/json"
_encode = msgspec.json.Encoder(enc_hook=str).encode
_ONCE_A_DAY = Quota(rate_per_s=1 / 86_400, rate_burst=1)


class Bytes(msgspec.Struct, frozen=True):
    """A response body that is not JSON, with its media type."""

    data: bytes
    media: str


class RouteContext:
    """What all routes share."""

    def __init__(
        self,
        settings: GatewaySettings,
        auth: Auth,
        streamer: Streamer,
        rate: RateLimit,
        audit: AuditLog,
        searches: SearchLimit,
        bodies: BodyBudget,
    ) -> None:
        self.settings = settings
        self.auth = auth
        self.streamer = streamer
        self.rate = rate
        self.audit = audit
        self.searches = searches
        self.bodies = bodies
        # Actions of a key on its own objects fill at most a hundredth of the audit log per day.
        # Without this limit, one tenant could have the entries of administrators pruned.
        share = max(1, settings.audit_keep // 100)
        self.own_share = Quota(rate_per_s=share / 86_400, rate_burst=share)
        self.own_acts = RateLimit()
        self.share_log = RateLimit()


class Resource:
    """All methods of one path."""

    def __init__(
        self,
        context: RouteContext,
        path: str,
        endpoints: Sequence[Endpoint],
        feed: Feed | None = None,
        queue: str = "",
    ) -> None:
        self._context = context
        self._path = path
        self._feed = feed
        self._queue = queue
        self._endpoints = {endpoint.method: endpoint for endpoint in endpoints}
        self.rights = {endpoint.method: endpoint.right for endpoint in endpoints}
        self.is_stream = any(
            reply.media == STREAM for each in endpoints for reply in each.replies.values()
        )
        if "GET" in self._endpoints:
            self._endpoints.setdefault("HEAD", self._endpoints["GET"])
        self._allow = ", ".join(sorted(self._endpoints))
        self._decoders = {
            endpoint.method: msgspec.json.Decoder(endpoint.takes)
            for endpoint in endpoints
            if endpoint.takes is not None
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ROUTE] = self._path
        endpoint = self._endpoints.get(scope["method"])
        if endpoint is None:
            raise Problem("method", headers=(("allow", self._allow),))
        headers = headers_of(scope)
        context = self._context
        caller = await self._admit(endpoint, scope, headers)
        right = endpoint.right
        quota = context.auth.quota(caller.requester)
        # Probes, scrapers and workers belong to the operator and have no rate limit.
        if right.scope not in ("", "jobs:work") and endpoint.tag != "health":
            context.rate.take(caller.requester, quota)
        gone = partial(until_disconnected, receive)
        body = None
        if endpoint.takes is not None:
            check_media(headers)
            bytes_max = context.settings.body_limit(endpoint.bytes_max, quota)
            decoder = self._decoders[endpoint.method]
            with context.bodies.hold(caller.who) as held:
                timeout_ms = context.settings.body_timeout_ms
                raw = await read_body(receive, headers, bytes_max, timeout_ms, held)
                if len(raw) <= LARGE:
                    body = decode(decoder, raw)
                else:
                    works = right.scope == "jobs:work"
                    body = await decode_large(decoder, raw, caller.who, works=works, gone=gone)
        call = Call(
            caller=caller,
            right=right,
            path=scope.get("path_params", {}),
            query=_query(endpoint, scope) if endpoint.asks is not None else None,
            body=body,
            headers=headers,
            gone=gone,
            is_allowed=partial(context.auth.is_valid, caller),
        )
        work = self._change(endpoint, call) if right.does else endpoint.handle(call)
        if endpoint.is_search:
            work = context.searches.run(caller.who, call.gone, work)
        answer = await work
        if isinstance(answer, Answer):
            with context.bodies.hold(caller.who) as held:
                # The answer to a change is not refused: the client would make the change again.
                changed = right.does and not answer.only_reads
                await _send_answer(answer, send, scope.get(BASE, ""), None if changed else held)
        elif self._feed is not None:
            await context.streamer.serve(self._feed, answer, caller, scope, receive, send)

    async def _admit(self, endpoint: Endpoint, scope: Scope, headers: Mapping[str, str]) -> Caller:
        right = endpoint.right
        if not right.scope:
            return Caller()
        caller = await self._context.auth.admit(scope, headers, acts=bool(right.does))
        refusal = right.refusal(caller)
        if refusal:
            raise Problem("scope", refusal)
        return caller

    async def _change(self, endpoint: Endpoint, call: Call) -> Answer | Follow:
        """Handle a call that changes something, and write its entry in the audit log."""
        if call.right.audit == "call":
            await self._context.audit.check()
        try:
            answer = await endpoint.handle(call)
        except ReplyLost:  # the change may have been made
            await self._record(call, LOST)
            raise
        if call.right.audit == "call" or call.touched:
            await self._record(call, "ok")
        return answer

    async def _record(self, call: Call, outcome: str) -> None:
        caller, right = call.caller, call.right
        foreign = any(not caller.owns(owner) for owner, _ in call.touched)
        if right.audit != "call" and not (right.audit == "others" and foreign):
            return
        ids = list(dict.fromkeys(object_id for _, object_id in call.touched if object_id))
        if not foreign and not caller.may("admin"):
            try:
                self._context.own_acts.take(caller.who, self._context.own_share)
            except Problem:
                fields = {"action": right.does, "queue": self._queue, "ids": ids[:IDS_MAX]}
                with suppress(Problem):  # one line per key and day: the log is bounded too
                    self._context.share_log.take(caller.who, _ONCE_A_DAY)
                    _log.info("action_beyond_share", who=caller.who, outcome=outcome, **fields)
                return
        await self._context.audit.record(
            caller.who,
            right.does,
            queue=self._queue,
            ids=ids,
            whose=[owner for owner, _ in call.touched] or [caller.requester],
            outcome=outcome,
        )


def _query(endpoint: Endpoint, scope: Scope) -> Any:
    raw: bytes = scope["query_string"]
    pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True) if raw else []
    try:
        return msgspec.convert(dict(pairs), endpoint.asks, strict=False)
    except msgspec.ValidationError as error:
        for name, text in pairs:
            if _is_beyond(text):
                raise Problem(
                    "bad_number", f"{name} is a number that 64 bits do not hold"
                ) from None
        raise invalid(error, endpoint.asks) from None


async def _send_answer(answer: Answer, send: Send, base: str, held: HeldBody | None) -> None:
    """Send an answer. `held` counts a large one until the client has read it, or refuses it."""
    headers = [
        (name.encode(), (base + value if name == "location" else value).encode())
        for name, value in answer.headers
    ]
    body = b""
    if isinstance(answer.body, Bytes):
        body = answer.body.data
        headers.append((b"content-type", answer.body.media.encode()))
    elif answer.body is not None:
        body = _encode(answer.body)
        headers.append((b"content-type", _JSON))
    if answer.status != 204:
        headers.append((b"content-length", b"%d" % len(body)))
    start = {"type": "http.response.start", "status": answer.status, "headers": headers}
    if len(body) <= _LARGE_ANSWER:
        await send(start)
        await send({"type": "http.response.body", "body": body})
        return
    if held is not None:
        held.add(len(body))
    await send(start)
    for at in range(0, len(body), _CHUNK_BYTES):  # each waits until the client has read
        chunk, more = body[at : at + _CHUNK_BYTES], at + _CHUNK_BYTES < len(body)
        await send({"type": "http.response.body", "body": chunk, "more_body": more})


def _is_beyond(text: str) -> bool:
    """Whether a query parameter is a number that 64 bits do not hold.

    >>> [_is_beyond(text) for text in ("500", "9223372036854775808", "1e400", "abc", "-1e19")]
    [False, True, True, False, True]
    """
    return bool(_NUMBER.fullmatch(text)) and not abs(float(text)) < INTEGER_MAX
