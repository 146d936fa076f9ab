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
from starlette.types import Receive, Scope, Send

from leasehold.core.endpoint import Answer, Call, Caller, Endpoint, Follow
from leasehold.gateway.auth import Door
from leasehold.gateway.body import check_media, decode, invalid, read_body
from leasehold.gateway.feed import Feed
from leasehold.gateway.limits import RateLimit
from leasehold.gateway.problems import Problem
from leasehold.gateway.settings import GatewaySettings
from leasehold.gateway.sse import Streamer

ROUTE = "leasehold.route"  # where the edge finds the path's template for its metrics
_JSON = b"application/json"
_encode = msgspec.json.Encoder(enc_hook=str).encode


class Bytes(msgspec.Struct, frozen=True):
    """A body that is not JSON, with its media type."""

    data: bytes
    media: str


class Desk:
    """What every endpoint is served with."""

    def __init__(
        self, settings: GatewaySettings, door: Door, streamer: Streamer, rate: RateLimit
    ) -> None:
        self.settings = settings
        self.door = door
        self.streamer = streamer
        self.rate = rate


class Resource:
    """All methods of one path."""

    def __init__(
        self,
        desk: Desk,
        path: str,
        endpoints: Sequence[Endpoint],
        feed: Feed | None = None,
        queue_url: str = "",
    ) -> None:
        self._desk = desk
        self._path = path
        self._feed = feed
        self._queue_url = queue_url
        self._endpoints = {endpoint.method: endpoint for endpoint in endpoints}
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
        if endpoint.scope and endpoint.tag != "health":  # probes and scrapers always get through
            desk.rate.take(caller.requester)
        call = Call(
            caller=caller,
            path=scope.get("path_params", {}),
            query=_query(endpoint, scope),
            body=await self._body(endpoint, receive, headers),
            headers=headers,
            gone=partial(_gone, receive),
        )
        answer = await endpoint.handle(call)
        if isinstance(answer, Answer):
            await _answer(answer, send)
        elif self._feed is not None:
            await desk.streamer.serve(self._feed, answer, caller, scope, receive, send)

    async def _admit(self, endpoint: Endpoint, scope: Scope, headers: Mapping[str, str]) -> Caller:
        if not endpoint.scope:
            return Caller()
        caller = await self._desk.door.admit(scope, headers, queue_url=self._queue_url)
        if not caller.may(endpoint.scope):
            raise Problem("scope", f"this needs a key with the scope {endpoint.scope}")
        return caller

    async def _body(self, endpoint: Endpoint, receive: Receive, headers: Mapping[str, str]) -> Any:
        decoder = self._decoders.get(endpoint.method)
        if decoder is None:
            return None
        settings = self._desk.settings
        check_media(headers)
        bytes_max = settings.body_limit(endpoint.bytes_max)
        raw = await read_body(receive, headers, bytes_max, settings.body_timeout_ms)
        return decode(decoder, raw)


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
