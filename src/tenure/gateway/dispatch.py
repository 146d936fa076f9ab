"""One resource as an ASGI application: admit, limit, read, handle, answer.

Endpoints are called without a framework in between: that, and msgspec, is what lets one process
answer several thousand requests a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

import msgspec
import structlog
from starlette.types import Receive, Scope, Send

from tenure.core.endpoint import Answer, Call, Caller, Endpoint, Follow
from tenure.core.errors import ReplyLost
from tenure.dashboard.audit import IDS_MAX, LOST, AuditLog, write_down
from tenure.gateway.auth import Door
from tenure.gateway.body import check_media, decoded, invalid, is_beyond, read_body
from tenure.gateway.feed import Feed
from tenure.gateway.limits import Quota, RateLimit
from tenure.gateway.problems import Problem
from tenure.gateway.settings import GatewaySettings
from tenure.gateway.sse import Streamer

_log = structlog.get_logger("tenure.audit")

ROUTE = "tenure.route"  # where the edge finds the path's template for its metrics
_JSON = b"application/json"
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Bytes(msgspec.Struct, frozen=True):
    """A body that is not JSON, with its media type."""

    data: bytes
    media: str


class Desk:
    """What every endpoint is served with."""

    def __init__(
        self,
        settings: GatewaySettings,
        door: Door,
        streamer: Streamer,
        rate: RateLimit,
        audit: AuditLog,
    ) -> None:
        self.settings = settings
        self.door = door
        self.streamer = streamer
        self.rate = rate
        self.audit = audit
        # A key's acts on its own objects add at most a hundredth of the log a day: else one tenant
        # could have the acts of administrators pruned.
        share = max(1, settings.audit_keep // 100)
        self.own_share = Quota(rate_per_s=share / 86_400, rate_burst=share)
        self.own_acts = RateLimit()


class Resource:
    """All methods of one path."""

    def __init__(
        self,
        desk: Desk,
        path: str,
        endpoints: Sequence[Endpoint],
        feed: Feed | None = None,
        queue_url: str = "",
        queue: str = "",
    ) -> None:
        self._desk = desk
        self._path = path
        self._feed = feed
        self._queue_url = queue_url
        self._queue = queue
        self._endpoints = {endpoint.method: endpoint for endpoint in endpoints}
        self.rights = {endpoint.method: endpoint.right for endpoint in endpoints}
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
        desk = self._desk
        caller = await self._admit(endpoint, scope, headers)
        right = endpoint.right
        quota = desk.door.quota(caller.requester)
        # Probes and scrapers always get through, and so do workers: they are the operator's.
        if right.scope not in ("", "jobs:work") and endpoint.tag != "health":
            desk.rate.take(caller.requester, quota)
        call = Call(
            caller=caller,
            right=right,
            path=scope.get("path_params", {}),
            query=_query(endpoint, scope),
            body=await self._body(endpoint, receive, headers, caller),
            headers=headers,
            gone=partial(_gone, receive),
        )
        answer = await (self._acted(endpoint, call) if right.does else endpoint.handle(call))
        if isinstance(answer, Answer):
            await _answer(answer, send)
        elif self._feed is not None:
            await desk.streamer.serve(self._feed, answer, caller, scope, receive, send)

    async def _admit(self, endpoint: Endpoint, scope: Scope, headers: Mapping[str, str]) -> Caller:
        right = endpoint.right
        if not right.scope:
            return Caller()
        caller = await self._desk.door.admit(
            scope, headers, queue_url=self._queue_url, acts=bool(right.does)
        )
        refusal = right.refusal(caller)
        if refusal:
            raise Problem("scope", refusal)
        return caller

    async def _acted(self, endpoint: Endpoint, call: Call) -> Answer | Follow:
        """The answer to a call that changes something, and its entry in the audit log."""
        if call.right.audit == "call":
            await self._desk.audit.check()
        try:
            answer = await endpoint.handle(call)
        except ReplyLost:  # it may have been done
            await self._note(call, LOST)
            raise
        await self._note(call, "ok")
        return answer

    async def _note(self, call: Call, outcome: str) -> None:
        caller, right = call.caller, call.right
        foreign = any(not caller.owns(owner) for owner, _ in call.touched)
        if right.audit != "call" and not (right.audit == "others" and foreign):
            return
        ids = list(dict.fromkeys(object_id for _, object_id in call.touched if object_id))
        if not foreign and not caller.may("admin"):
            try:
                self._desk.own_acts.take(caller.who, self._desk.own_share)
            except Problem:
                said = {"action": right.does, "queue": self._queue, "ids": ids[:IDS_MAX]}
                _log.info("action_beyond_share", who=caller.who, outcome=outcome, **said)
                return
        await write_down(
            self._desk.audit,
            caller.who,
            right.does,
            queue=self._queue,
            ids=ids,
            whose=[owner for owner, _ in call.touched] or [caller.requester],
            outcome=outcome,
        )

    async def _body(
        self, endpoint: Endpoint, receive: Receive, headers: Mapping[str, str], caller: Caller
    ) -> Any:
        decoder = self._decoders.get(endpoint.method)
        if decoder is None:
            return None
        settings = self._desk.settings
        check_media(headers)
        quota = self._desk.door.quota(caller.requester)
        bytes_max = settings.body_limit(endpoint.bytes_max, quota)
        raw = await read_body(receive, headers, bytes_max, settings.body_timeout_ms)
        works = endpoint.right.scope == "jobs:work"
        gone = partial(_gone, receive)
        return await decoded(decoder, raw, who=caller.who, works=works, gone=gone)


async def _gone(receive: Receive) -> None:
    """Until the client has hung up; its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


def headers_of(scope: Scope) -> dict[str, str]:
    """The request's headers by lower-case name; of several with one name the last."""
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _query(endpoint: Endpoint, scope: Scope) -> Any:
    if endpoint.asks is None:
        return None
    raw: bytes = scope["query_string"]
    pairs = parse_qsl(raw.decode("latin-1"), keep_blank_values=True) if raw else []
    try:
        return msgspec.convert(dict(pairs), endpoint.asks, strict=False)
    except msgspec.ValidationError as error:
        for name, text in pairs:
            if is_beyond(text):
                raise Problem(
                    "bad_number", f"{name} is a number that 64 bits do not hold"
                ) from None
        raise invalid(error, endpoint.asks) from None


async def _answer(answer: Answer, send: Send) -> None:
    headers = [(name.encode(), value.encode()) for name, value in answer.headers]
    body = b""
    if isinstance(answer.body, Bytes):
        body = answer.body.data
        headers.append((b"content-type", answer.body.media.encode()))
    elif answer.body is not None:
        body = _encode(answer.body)
        headers.append((b"content-type", _JSON))
    if answer.status != 204:
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


__all__ = ["ROUTE", "Bytes", "Desk", "Follow", "Resource", "headers_of"]
