"""A gateway client for the commands, on the standard library's HTTP client, which loads fast."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from tenure.cli.console import Exit, Failed
from tenure.core.errors import NotFound, QueueFull, ReplyLost, StoreUnreachable, UsageError
from tenure.core.job import JobEvent, NewJob, Submitted

_TIMEOUT_S = 30.0  # longer than the heartbeat interval of an event stream
_RECONNECTS_MAX = 5
_FINAL_EVENTS = ("done", "error", "canceled")


class GatewayClient:
    """Submits and follows jobs; maps the contract's `status` and `created_ts` to our names."""

    def __init__(self, url: str, api_key: str = "") -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no gateway; one looks like http://127.0.0.1:8470")
        self._url = f"{parts.scheme}://{parts.netloc}"
        self._kind = _connection_kind(parts.scheme)
        self._host, self._port = parts.hostname, parts.port
        self._path = parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

    async def submit(self, job: NewJob) -> Submitted:
        body: dict[str, Any] = {"task": job.task, "payload": msgspec.Raw(job.payload)}
        if job.ttl_ms is not None:
            body["ttl_s"] = -(-job.ttl_ms // 1000)
        if job.delay_ms:
            body["delay_ms"] = job.delay_ms
        if job.max_attempts is not None:
            body["max_attempts"] = job.max_attempts
        headers = {"Content-Type": "application/json"}
        if job.idempotency_key:
            headers["Idempotency-Key"] = job.idempotency_key
        answer, replayed = await asyncio.to_thread(
            self._call, "POST", "/v1/jobs", msgspec.json.encode(body), headers
        )
        return Submitted(str(answer["job_id"]), "replayed" if replayed else "created")

    async def job(self, job_id: str) -> dict[str, Any]:
        answer, _ = await asyncio.to_thread(self._call, "GET", f"/v1/jobs/{quote(job_id, safe='')}")
        renamed = {"status": "own_state", "created_ts": "created_ms", "updated_ts": "updated_ms"}
        job = {renamed.get(key, key): value for key, value in answer.items()}
        return {"state": job["own_state"], **job}

    async def follow(self, job_id: str) -> AsyncIterator[JobEvent]:
        after, failures = "", 0
        while True:
            received = False
            try:
                async for event in self._stream(job_id, after):
                    received, failures = True, 0
                    after = event.event_id or after
                    yield event
                    if event.type in _FINAL_EVENTS:
                        return
            except (OSError, http.client.HTTPException, StoreUnreachable, ReplyLost):
                failures += 1
                if failures > _RECONNECTS_MAX:
                    raise
            # The stream ended early: the gateway is stopping, or the job has no more events.
            if not failures and not received and await self._has_ended(job_id):
                return
            await asyncio.sleep(0.1 * 2**failures)

    async def _has_ended(self, job_id: str) -> bool:
        return (await self.job(job_id))["own_state"] in _FINAL_EVENTS

    async def close(self) -> None:
        return None

    async def _stream(self, job_id: str, after: str) -> AsyncIterator[JobEvent]:
        connection = self._kind(self._host, self._port, timeout=_TIMEOUT_S)
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": after} if after else {})
        path = f"/v1/jobs/{quote(job_id, safe='')}/events"
        try:
            response = await asyncio.to_thread(self._send, connection, "GET", path, None, headers)
            if response.status == http.client.NO_CONTENT:
                return
            if response.status != http.client.OK:
                raise _refusal(response.status, response.read(), response.headers)
            lines: list[str] = []
            while line := await asyncio.to_thread(response.readline):
                lines.append(line.decode().rstrip("\r\n"))
                if lines[-1] == "":
                    for event in parse_sse(lines):
                        yield event
                    lines = []
        finally:
            _disconnect(connection)

    def _call(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[dict[str, Any], bool]:
        connection = self._kind(self._host, self._port, timeout=_TIMEOUT_S)
        try:
            response = self._send(connection, method, path, body, headers or {})
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._reply_lost(error) from None
        finally:
            connection.close()
        if response.status >= http.client.BAD_REQUEST:
            raise _refusal(response.status, content, response.headers)
        replayed = response.headers.get("Idempotency-Replayed", "").lower() == "true"
        return msgspec.json.decode(content), replayed

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
    ) -> http.client.HTTPResponse:
        try:
            connection.connect()
        except OSError as error:
            raise StoreUnreachable(f"the gateway {self._url} does not answer: {error}") from None
        try:
            connection.request(method, self._path + path, body, self._headers | headers)
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise self._reply_lost(error) from None

    def _reply_lost(self, error: Exception) -> ReplyLost:
        return ReplyLost(
            f"the gateway {self._url} did not answer a request ({error!r}): "
            "the request may have been executed"
        )


def fetch(url: str, timeout_s: float) -> tuple[int, bytes]:
    """The status and body of a GET, without proxies and redirects; blocks; raises `OSError`."""
    parts = urlsplit(url)
    connection = _connection_kind(parts.scheme)(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("GET", parts._replace(scheme="", netloc="").geturl())
        response = connection.getresponse()
        return response.status, response.read()
    except http.client.HTTPException as error:
        raise OSError(f"no HTTP: {error!r}") from None
    finally:
        connection.close()


def _connection_kind(scheme: str) -> type[http.client.HTTPConnection]:
    return http.client.HTTPSConnection if scheme == "https" else http.client.HTTPConnection


def parse_sse(lines: list[str]) -> Iterator[JobEvent]:
    """The event in a block of SSE lines, if it is one of the job (`hello` is not)."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name:
            value = value.removeprefix(" ")
            fields[name] = f"{fields['data']}\n{value}" if name == "data" in fields else value
    if "event" not in fields or fields["event"] == "hello":
        return
    body = msgspec.json.decode(fields.get("data", "{}").encode())
    data = body.get("data", body) if isinstance(body, dict) else body
    known = body if isinstance(body, dict) else {}
    yield JobEvent(
        event_id=fields.get("id", ""),
        type=fields["event"],
        ts_ms=int(known.get("ts") or 0),
        step=str(known.get("step") or ""),
        data=msgspec.json.encode(data),
    )


def _refusal(status: int, content: bytes, headers: Any) -> Exception:
    """The error for a problem object of the gateway."""
    try:
        problem = msgspec.json.decode(content)
        detail = str(problem.get("detail") or problem.get("title"))
    except (msgspec.DecodeError, AttributeError):
        detail = content.decode(errors="replace")[:200] or f"HTTP {status}"
    match status:
        case 404:
            return NotFound(detail)
        case 409:
            return Failed(Exit.CONFLICT, detail, status=status)
        case 429:
            return QueueFull(detail, retry_after_ms=int(headers.get("Retry-After") or 1) * 1000)
        case 400 | 413 | 422:
            return Failed(Exit.USAGE, f"the gateway refused it: {detail}", status=status)
        case 502 | 503 | 504:
            # A gateway that lost the reply of its store answers 503 as well.
            return ReplyLost(
                f"the gateway answered {status}: {detail}; the request may have been executed"
            )
        case _:
            return Failed(Exit.ERROR, f"the gateway answered {status}: {detail}", status=status)


def _disconnect(connection: http.client.HTTPConnection) -> None:
    """Close, after a shutdown that wakes a thread which still waits for a line."""
    if connection.sock is not None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
