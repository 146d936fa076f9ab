"""The bodies of requests: read within limits of size and time, and decoded.

The size of a body is counted while it arrives, so that neither a false Content-Length nor a chunked
upload can fill the memory.
"""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Annotated, Any, get_args, get_type_hints

import msgspec
from msgspec import inspect
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tenure.core.encoding import INTEGER_MAX, json_fault
from tenure.dashboard.api import run_while_connected
from tenure.gateway.limits import raised_by
from tenure.gateway.problems import Problem

LARGE = 64 * 1024
"""Bodies of more bytes are decoded in a thread."""
_IN_THREAD_MAX = 2  # bodies of one caller in the queue of the decoding thread
_WAITING_MAX = 16
_ALL_MAX = 256
_HELD_BYTES_MAX = 64 << 20  # of one caller
_HELD_BYTES_ALL_MAX = 512 << 20
_FLOAT = re.compile(rb"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")
_syntax = msgspec.json.Decoder(msgspec.Raw).decode
_UNKNOWN = re.compile(r"unknown field `(.+?)`")
_AT = re.compile(r" - at `(.+)`$")
_MISSING = re.compile(r"missing required field `(.+?)`")


class BodyBudget:
    """Limits the bytes of the bodies that are under way, of one caller and of all together.

    Without it, one key could have a body of the largest size on each of a thousand connections. The
    bodies of large answers count too, until the client has read them.
    """

    def __init__(
        self, per_caller: int = _HELD_BYTES_MAX, of_all: int = _HELD_BYTES_ALL_MAX
    ) -> None:
        self._per_caller = per_caller
        self._of_all = of_all
        self.held: Counter[str] = Counter()
        self.total = 0

    def hold(self, who: str) -> HeldBody:
        """A context in which the bytes of one body are counted."""
        return HeldBody(self, who)

    def add(self, who: str, size: int) -> None:
        """Count bytes, or raise `Problem` if they are too many."""
        close = (("connection", "close"),)
        if who and self.held[who] + size > self._per_caller:
            detail = f"the bodies of this key that are under way have {self.held[who]} bytes"
            raise Problem("rate_limited", detail, headers=close, retry_after_s=1)
        if self.total + size > self._of_all:
            detail = "the bodies that are under way are too large together"
            raise Problem("busy", detail, headers=close, retry_after_s=1)
        self.held[who] += size
        self.total += size

    def remove(self, who: str, size: int) -> None:
        """Bytes that `add` counted are no longer held."""
        self.total -= size
        self.held[who] -= size
        if not self.held[who]:
            del self.held[who]


class HeldBody:
    """The bytes of one body that are counted in a `BodyBudget` until the exit."""

    __slots__ = ("_budget", "_bytes", "_who")

    def __init__(self, budget: BodyBudget, who: str) -> None:
        self._budget = budget
        self._who = who
        self._bytes = 0

    def __enter__(self) -> HeldBody:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bytes:
            self._budget.remove(self._who, self._bytes)

    def add(self, size: int) -> None:
        """Count more bytes of the body, or raise `Problem`."""
        self._budget.add(self._who, size)
        self._bytes += size


async def read_body(
    receive: Receive,
    headers: Mapping[str, str],
    bytes_max: int,
    timeout_ms: int,
    held: HeldBody,
) -> bytes:
    """The whole body; raises `Problem` as soon as it is too large or too slow.

    `held` counts the bytes that wait for the rest of their body.
    """
    declared = headers.get("content-length", "")
    if declared.isdigit() and int(declared) > bytes_max:
        raise _too_large(bytes_max)
    message = await _next(receive, timeout_ms)
    first: bytes = message.get("body", b"")
    if len(first) > bytes_max:
        raise _too_large(bytes_max)
    if not message.get("more_body", False):
        return first
    held.add(len(first))
    return await _read_rest(receive, first, bytes_max, timeout_ms, held)


async def _next(receive: Receive, timeout_ms: int) -> Any:
    """The next message.

    Most request bodies arrive in the same packet as the headers, so we skip the timeout timer then.
    """
    waiting: Any = receive()
    try:
        paused_at = waiting.send(None)
    except StopIteration as done:
        message = done.value
    else:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                message = await _Resumed(waiting, paused_at)
        except TimeoutError:
            raise Problem("body_timeout", headers=(("connection", "close"),)) from None
    if message["type"] == "http.disconnect":
        raise ClientDisconnect
    return message


class _Resumed:
    """Resumes a coroutine that was started by hand and has stopped at its first `await`."""

    __slots__ = ("_begun", "_paused_at")

    def __init__(self, begun: Any, paused_at: Any) -> None:
        self._begun = begun
        self._paused_at = paused_at

    def __await__(self) -> Generator[Any, Any, Any]:
        paused_at = self._paused_at
        try:
            while True:
                try:
                    sent = yield paused_at
                except BaseException as error:
                    paused_at = self._begun.throw(error)
                else:
                    paused_at = self._begun.send(sent)
        except StopIteration as done:
            return done.value


async def _read_rest(
    receive: Receive,
    first: bytes,
    bytes_max: int,
    timeout_ms: int,
    held: HeldBody,
) -> bytes:
    """Read the other chunks of a body. The deadline is for all of them together."""
    chunks = [first]
    size = len(first)
    deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
    while True:
        left_ms = int((deadline - asyncio.get_running_loop().time()) * 1000)
        message = await _next(receive, max(left_ms, 1))
        chunk: bytes = message.get("body", b"")
        size += len(chunk)
        if size > bytes_max:
            raise _too_large(bytes_max)
        held.add(len(chunk))
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


def _too_large(bytes_max: int) -> Problem:
    how = raised_by("--body", "gateway.body_bytes_max")
    detail = f"the body is limited to {bytes_max} bytes; {how}"
    return Problem("too_large", detail, headers=(("connection", "close"),), limit_bytes=bytes_max)


def check_media(headers: Mapping[str, str]) -> None:
    """Refuse a body whose Content-Type is not JSON."""
    given = headers.get("content-type", "")
    if given == "application/json":
        return
    media = given.partition(";")[0].strip().lower()
    if media != "application/json":
        found = f", not {media[:80]!r}" if media else "; there is no Content-Type"
        raise Problem(
            "media_type", f"the body has to be application/json{found}", accept="application/json"
        )


class BodyQueue:
    """Decodes large bodies in one thread: more threads would only compete with the event loop.

    `per_caller` limits the bodies of a caller that wait. Only two of them at a time are in the
    queue of the thread, so that a caller does not wait for all bodies of another one.
    """

    def __init__(self, name: str, per_caller: int) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._per_caller = per_caller
        self._turns: dict[str, asyncio.Semaphore] = {}
        self.places: Counter[str] = Counter()

    async def decoded(
        self,
        decoder: msgspec.json.Decoder[Any],
        raw: bytes,
        who: str,
        gone: Callable[[], Awaitable[None]] | None,
    ) -> Any:
        """The typed body. If the client disconnects while the body waits, it is not decoded."""
        if who and self.places[who] >= self._per_caller:
            detail = f"{self._per_caller} bodies above {LARGE} bytes of this key wait to be read"
            raise Problem("rate_limited", detail, retry_after_s=1)
        if self.places.total() >= _ALL_MAX:
            raise Problem("busy", "too many large bodies wait to be read", retry_after_s=1)
        self.places[who] += 1
        turn = self._turns.setdefault(who, asyncio.Semaphore(_IN_THREAD_MAX))
        try:
            return await run_while_connected(self._read(decoder, raw, turn), gone)
        finally:
            self.places[who] -= 1
            if not self.places[who]:
                del self.places[who], self._turns[who]

    async def _read(
        self, decoder: msgspec.json.Decoder[Any], raw: bytes, turn: asyncio.Semaphore
    ) -> Any:
        async with turn:
            work = self._thread.submit(_decode_without_gc, decoder, raw)
            try:
                return await asyncio.wrap_future(work)
            except asyncio.CancelledError:
                if not work.cancelled():  # it is being decoded: keep the place until that ends
                    await asyncio.wait((asyncio.wrap_future(work),))
                raise


_CLIENT_BODIES = BodyQueue("body", _WAITING_MAX)
_WORKER_BODIES = BodyQueue("work-body", _ALL_MAX // 4)


async def decode_large(
    decoder: msgspec.json.Decoder[Any],
    raw: bytes,
    who: str,
    *,
    works: bool = False,
    gone: Callable[[], Awaitable[None]] | None = None,
) -> Any:
    """Like `decode`, in a thread: for bodies above `LARGE`, to keep the event loop free.

    Bodies of workers (`works`) do not wait for the bodies of clients.
    """
    return await (_WORKER_BODIES if works else _CLIENT_BODIES).decoded(decoder, raw, who, gone)


def _decode_without_gc(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    """Decode without the garbage collector. JSON has no cycles, and looking for them while many
    values are made would take most of the time and hold the interpreter lock."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return decode(decoder, raw)
    finally:
        if collecting:
            gc.enable()


def decode(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    """The typed body, or the `Problem` that names what is wrong with it and where."""
    try:
        if len(raw) > LARGE:
            _outline(decoder).decode(raw)
        value = _typed(decoder, raw)
        fault = json_fault(raw)  # also checks the fields that are kept as raw JSON
    except msgspec.ValidationError as error:
        # JSON that is faulty as a whole is not the fault of the field in which it was noticed.
        fault = _syntax_fault(raw)
        if not fault:
            raise invalid(error, decoder.type) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("bad_json", f"the body is not JSON: {error}") from None
    except RecursionError:
        fault = "too_deep"
    if fault:
        raise Problem(fault)
    return value


def _syntax_fault(raw: bytes) -> str:
    try:
        _syntax(raw)
        raw.decode()
    except RecursionError:
        return "too_deep"
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Problem("bad_json", f"the body cannot be kept: {error}") from None
    fault = json_fault(raw, number_max=INTEGER_MAX)
    return "" if fault == "nul" else fault


@lru_cache(maxsize=64)
def _outline(decoder: msgspec.json.Decoder[Any]) -> msgspec.json.Decoder[Any]:
    """Reads only the lengths of lists of objects: a list that is too long is not decoded."""
    fields: list[tuple[str, Any, Any]] = []
    for field in getattr(inspect.type_info(decoder.type), "fields", ()):
        for kind in getattr(field.type, "types", (field.type,)):
            objects = isinstance(getattr(kind, "item_type", None), inspect.StructType)
            if objects and kind.max_length:
                listed = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=kind.max_length)]
                fields.append((field.encode_name, listed | None, None))
    return msgspec.json.Decoder(msgspec.defstruct("Outline", fields))


def _typed(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    """Decode. 16.0 is an integer to JSON Schema, and some languages write integers like that."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
    # The decoder runs in C and skips members that are not fields, of which there may be many.
    held = msgspec.structs.asdict(_fields(decoder).decode(raw))
    members = {name: _whole(bytes(each)) for name, each in held.items() if each is not None}
    return decoder.decode(msgspec.json.encode(members))


@lru_cache(maxsize=64)
def _fields(decoder: msgspec.json.Decoder[Any]) -> msgspec.json.Decoder[Any]:
    """Reads the fields of a shape as raw JSON."""
    info: Any = inspect.type_info(decoder.type)
    fields = [(field.encode_name, msgspec.Raw, None) for field in getattr(info, "fields", ())]
    strict = getattr(info, "forbid_unknown_fields", False)
    return msgspec.json.Decoder(msgspec.defstruct("Fields", fields, forbid_unknown_fields=strict))


def _whole(text: bytes) -> msgspec.Raw:
    if _FLOAT.fullmatch(text) and float(text).is_integer():
        text = b"%d" % float(text)
    return msgspec.Raw(text)


def invalid(error: msgspec.ValidationError, shape: Any) -> Problem:
    """A 422 that names the field of `shape`, and the values that an enum field accepts."""
    text = str(error)
    where = _AT.search(text)
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    parent = where.group(1) if where else "$"
    field = f"{parent}.{named.group(1)}" if named else parent
    field = field.removeprefix("$.").strip("$")
    values = _literals(_kind_of(field, shape)) if "enum value" in text else []
    hint = f"; it is one of {', '.join(values)}" if values else ""
    return Problem("invalid", text.replace("$.", "") + hint, field=field)


def _kind_of(field: str, shape: Any) -> Any:
    """The type of a field by its path, such as `outputs[0].format`."""
    for name in re.sub(r"\[[^]]*\]", "", field).split("."):
        shape = next(
            (get_type_hints(one)[name] for one in _structs(shape) if name in _names(one)), None
        )
    return shape


def _structs(kind: Any) -> list[Any]:
    """The structs within a type: itself, or what its list or union holds."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return [kind]
    return [struct for part in get_args(kind) for struct in _structs(part)]


def _names(struct: Any) -> tuple[str, ...]:
    return tuple(struct.__struct_fields__)


def _literals(kind: Any) -> list[str]:
    """The strings that a type allows; its Literal may be nested in other types."""
    return [
        value
        for part in get_args(kind)
        for value in ([part] if isinstance(part, str) else _literals(part))
    ]
