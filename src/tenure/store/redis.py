"""The Redis client: scripts as files, calls, pipelines, and blocking commands."""

from __future__ import annotations

import asyncio
import hashlib
import re
import socket
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import hiredis

from tenure.core.errors import ReplyLost, ServerError, StoreError, StoreUnreachable, UsageError
from tenure.store.files import package_folder
from tenure.store.redis_address import Arg, RedisAddress, parse_address
from tenure.store.redis_connection import (
    MORE,
    Connector,
    Dialer,
    Node,
    check_greeting,
    command_name,
    encode,
    is_no_script,
    is_wrong_type,
    reply_reader,
)
from tenure.store.redis_topology import (
    Cluster,
    Sentinels,
    guard_key,
    redirect_of,
    slot_of,
    slot_ranges,
)

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

__all__ = [
    "Arg",
    "BulkRedis",
    "Redis",
    "Script",
    "ScriptFolder",
    "is_wrong_type",
    "load_script",
    "strip_comments",
]

_NAME = re.compile(r"(?P<operation>[A-Za-z][A-Za-z0-9_]*)-(?P<keys>\d+)\.lua")
_INCLUDE = re.compile(r"^[ \t]*--+[ \t]*@include[ \t]+(?P<name>\S+)[ \t]*$", re.MULTILINE)
_COMMENT_OR_STRING = re.compile(
    r"--\[\[.*?\]\]|--[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)
_KEYS_INDEX = re.compile(r"\bKEYS\b\s*(?:\[\s*(?P<index>[^\]]*?)\s*\])?")


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script with its includes expanded; `sha` is its hash for EVALSHA."""

    name: str
    keys: int
    source: str = field(repr=False)
    sha: str


class ScriptFolder(Mapping[str, Script]):
    """The scripts of a package by operation; each is read on first use."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._paths: dict[str, Traversable] = {}
        self._read: dict[str, Script] = {}

    def __getitem__(self, operation: str) -> Script:
        script = self._read.get(operation)
        if script is None:
            path = self._listed()[operation]
            includes = package_folder(self._package, "lua") / "include"
            script = self._read[operation] = load_script(path, includes)
        return script

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed())

    def __len__(self) -> int:
        return len(self._listed())

    def _listed(self) -> dict[str, Traversable]:
        if self._paths:
            return self._paths
        paths: dict[str, Traversable] = {}
        folder = package_folder(self._package, "lua")
        for path in sorted(folder.iterdir(), key=lambda path: path.name):
            if path.name.endswith(".lua"):
                operation, _ = _operation_and_keys(path.name)
                if operation in paths:
                    raise UsageError(f"{self._package}: two scripts are called {operation}")
                paths[operation] = path
        if not paths:
            raise UsageError(f"package {self._package} has no lua/<operation>-<keys>.lua")
        self._paths = paths
        return paths


def load_script(path: Traversable, includes: Traversable) -> Script:
    """One script file; its includes are in the folder `includes`."""
    operation, keys = _operation_and_keys(path.name)
    source = _expand(path.read_text(encoding="utf-8"), path.name, includes, (), set())
    used = _keys_used(source, path.name)
    if used != keys:
        raise UsageError(
            f"{path.name}: its name says {keys} keys, its greatest is KEYS[{used}]; "
            f"name it {operation}-{used}.lua or use every key"
        )
    # Redis names scripts by SHA-1; it protects nothing.
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    return Script(name=operation, keys=keys, source=source, sha=sha)


def strip_comments(source: str) -> str:
    """The code of a script without its comments and the contents of its strings."""
    return _COMMENT_OR_STRING.sub(lambda m: " " if m[0].startswith("--") else '""', source)


def _operation_and_keys(name: str) -> tuple[str, int]:
    match = _NAME.fullmatch(name)
    if match is None:
        raise UsageError(f"{name}: expected <operation>-<number of keys>.lua, such as claim-3.lua")
    return match["operation"], int(match["keys"])


def _expand(
    text: str, name: str, includes: Traversable, chain: tuple[str, ...], done: set[str]
) -> str:
    """`text` with its includes; `chain` is for finding cycles, `done` has those inserted."""

    def included(match: re.Match[str]) -> str:
        include = match["name"]
        if include in chain:
            raise UsageError(f"{name}: includes in a circle: {' -> '.join((*chain, include))}")
        if include in done:
            return f"-- {include} is included above"
        done.add(include)
        for folder in (includes, package_folder("tenure.store", "lua", "include")):
            path = folder / f"{include}.lua"
            if path.is_file():
                body = path.read_text(encoding="utf-8")
                return _expand(body, name, includes, (*chain, include), done)
        raise UsageError(f"{name}: there is no lua/include/{include}.lua to include")

    return _INCLUDE.sub(included, text)


def _keys_used(source: str, name: str) -> int:
    """The greatest n of KEYS[n] in the code."""
    greatest = 0
    for match in _KEYS_INDEX.finditer(strip_comments(source)):
        index = match["index"]
        if index is None or not index.isdigit() or int(index) < 1:
            raise UsageError(
                f"{name}: KEYS is used without a number; write KEYS[1], KEYS[2] ... and pass "
                f"what varies in number as ARGV"
            )
        greatest = max(greatest, int(index))
    return greatest


_RECEIVE_BYTES = 1 << 18
_ASK_WITHIN_S = 2.0


class Redis:
    """A client for one event loop. Replies are raw: bytes, int, list, None.

    The URL says whether there is one server, a primary that Sentinels name, or a cluster; callers
    need not know. It does not support commands that change the connection or answer more than once
    (SUBSCRIBE, MONITOR, SELECT, CLIENT REPLY). Blocking commands go through `block`.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str = "tenure",
        timeout_ms: int = 10_000,
        connect_timeout_ms: int = 5_000,
    ) -> None:
        address = self._address = parse_address(url)
        dialer = Dialer(name=name, timeout_ms=timeout_ms, connect_timeout_ms=connect_timeout_ms)
        sentinels = Sentinels(address, dialer) if address.topology == "sentinel" else None
        self._cluster = Cluster(address, dialer) if address.topology == "cluster" else None
        self._node = Node(  # unused on a cluster
            Connector(dialer, address, sentinels.locate if sentinels else None), timeout_ms
        )
        self._watch: Callable[[], Coroutine[Any, Any, None]] | None = None
        if sentinels is not None:
            self._watch = partial(sentinels.watch, self._primary_is)
        elif self._cluster is not None:
            self._watch = self._cluster.watch
        self._watching: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def __repr__(self) -> str:
        return f"Redis({self._address.label!r})"

    async def call(self, *args: Arg) -> Any:
        """Send one command; calls made at the same time share one write."""
        packed = encode(args)
        try:
            if self._cluster is not None:
                self._check_usable()
                return await self._cluster.call(args, packed)
            connection = self._node.main
            if (
                connection is None
                or connection.lost
                or self._loop is not asyncio.get_running_loop()
            ):
                self._check_usable()
                connection = await self._node.ready()
            return await connection.send(packed)
        except ServerError as error:
            error.operation = error.operation or command_name(args)
            if is_wrong_type(error) and args[0] not in ("EVALSHA", "EVAL"):
                await self._name_keys(error, args[1:2])
            raise

    async def pipeline(self, commands: Sequence[Sequence[Arg]]) -> list[Any]:
        """Send many commands in one write; an error reply is a value in the list of replies.

        On a cluster there is one write for each node, and MULTI ... EXEC is for keys of one slot.
        """
        packed = [encode(command) for command in commands]
        if not packed:
            return []
        self._check_usable()
        if self._cluster is not None:
            replies = await self._cluster.pipeline(commands, packed)
        else:
            replies = await (await self._node.ready()).send_many(packed)
        if all(isinstance(reply, StoreUnreachable) for reply in replies):
            raise replies[0]  # the server is loading: it executed none of them
        return replies

    def declared_keys(self, keys: Sequence[str | bytes]) -> Sequence[str | bytes]:
        """The keys that a call of a script declares: on a cluster one more (`guard_key`)."""
        return keys if self._cluster is None else (*keys, guard_key(keys[0]))

    async def run(self, script: Script, keys: Sequence[str | bytes], args: Sequence[Arg]) -> Any:
        """Run a script by its hash or, if the server does not have it yet, by its source."""
        _check_keys(script, keys)
        declared = self.declared_keys(keys)
        try:
            try:
                return await self.call("EVALSHA", script.sha, len(declared), *declared, *args)
            except ServerError as error:
                if not is_no_script(error):
                    raise
            return await self.call("EVAL", script.source, len(declared), *declared, *args)
        except ServerError as error:
            error.operation = script.name
            if is_wrong_type(error):
                await self._name_keys(error, keys)
            raise

    async def _name_keys(self, error: ServerError, keys: Sequence[Arg]) -> None:
        """Add the types of the call's keys to a WRONGTYPE error, which does not name them.

        A script may have failed on a key that it built itself; then these types are right.
        """
        try:
            types = await self.pipeline([("TYPE", key) for key in keys])
        except StoreError:
            return
        types_found = [
            f"{_text(key)} is a {kind.decode()}"
            for key, kind in zip(keys, types, strict=True)
            if isinstance(kind, bytes) and kind != b"none"
        ]
        error.named = f"a key holds a value of the wrong type: {', '.join(types_found)}"
        error.args = (f"{error.args[0]}: {', '.join(types_found)}",)

    async def load(self, scripts: Iterable[Script]) -> None:
        """Load scripts into the server before they are needed.

        `run` works without it, so it is no error if this user may not load scripts. On a cluster,
        where it is not known yet which server will be asked, it does nothing.
        """
        if self._cluster is None:
            await self.pipeline([("SCRIPT", "LOAD", each.source) for each in scripts])

    async def scan(self, pattern: str | bytes, *more: Arg) -> AsyncIterator[list[bytes]]:
        """The keys that match, a page at a time; on a cluster of all its primaries."""
        self._check_usable()
        cluster = self._cluster
        for connection in await cluster.primaries() if cluster else [await self._node.ready()]:
            cursor: Arg = 0
            while cursor != b"0":
                scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1_000, *more)
                cursor, found = await connection.send(encode(scan))
                yield found

    async def block(self, *args: Arg, wait_ms: int) -> Any:
        """Send a blocking command on a connection of its own; None if it timed out.

        `wait_ms` is the command's own timeout, for our timer. Cancelling the caller closes the
        connection, so that no other caller gets the late reply.
        """
        (reply,) = await self._blocked([args], wait_ms)
        if self._cluster is not None and redirect_of(reply):
            return None  # its slot moved: for the caller the time is up
        return _checked(reply, command_name(args))

    async def block_then_run(
        self,
        blocking: Sequence[Arg],
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Arg],
        *,
        wait_ms: int,
    ) -> Any:
        """Run a script as soon as a blocking command ends; returns the script's reply.

        Both are sent in one write, and the server reads the second when the first has ended: one
        round trip, where `block` and `run` take two. The script also runs if the blocking command
        fails.
        """
        _check_keys(script, keys)
        declared = self.declared_keys(keys)
        by_sha = ("EVALSHA", script.sha, len(declared), *declared, *args)
        waited, reply = await self._blocked([blocking, by_sha], wait_ms)
        redirected = self._cluster is not None and redirect_of(waited)
        if not redirected:
            _checked(waited, command_name(blocking))
        if isinstance(reply, ServerError) and (is_no_script(reply) or redirect_of(reply)):
            return await self.run(script, keys, args)
        return _checked(reply, script.name)

    async def _blocked(self, commands: Sequence[Sequence[Arg]], wait_ms: int) -> list[Any]:
        """The replies to commands, of which the first blocks; errors are values."""
        packed = [encode(command) for command in commands]
        self._check_usable()
        if self._cluster is not None:
            return await self._cluster.block(commands, packed, wait_ms)
        return await self._node.block(packed, wait_ms)

    async def server_time_ms(self) -> int:
        """The server's clock."""
        seconds, micros = await self.call("TIME")
        return int(seconds) * 1000 + int(micros) // 1000

    async def close(self) -> None:
        """Close all connections; pending calls fail. A closed client cannot be used again."""
        self._closed = True
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        await self._node.close()
        if self._cluster is not None:
            await self._cluster.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise UsageError(f"{self!r} was closed; open a new client")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise UsageError(
                f"{self!r} belongs to another event loop; each loop (or thread) opens its own"
            )
        if self._watch is not None and self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    def _primary_is(self, address: RedisAddress | None) -> None:
        """The Sentinels name this primary; connections to another one are closed."""
        connector = self._node.connector
        if connector.located is not None and connector.located != address:
            connector.located = address
            self._node.drop("the Sentinels replace this primary")


def _text(key: Arg) -> str:
    return key.decode(errors="replace") if isinstance(key, bytes) else str(key)


def _check_keys(script: Script, keys: Sequence[str | bytes]) -> None:
    if len(keys) != script.keys:
        raise UsageError(
            f"script {script.name} takes {script.keys} keys, {len(keys)} were given",
            operation=script.name,
        )


def _checked(reply: Any, operation: str) -> Any:
    """The reply; raises it if it is an error."""
    if isinstance(reply, ServerError):
        reply.operation = reply.operation or operation
    if isinstance(reply, StoreError):
        raise reply
    return reply


class BulkRedis:
    """A blocking client for reading long streams in a process without an event loop.

    It requests the next page before it returns the last one, so that the server works while the
    caller does. For one thread. On a cluster it speaks to the owner of `key`.
    """

    def __init__(
        self,
        url: str | RedisAddress,
        *,
        key: str = "",
        name: str = "tenure-bulk",
        timeout_s: float = 60.0,
    ) -> None:
        address = parse_address(url) if isinstance(url, str) else url
        if address.topology != "single":
            address = locate(address, key)
        self._label = address.label
        self._reader = reply_reader()
        try:
            if address.path:
                self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                self._socket.settimeout(timeout_s)
                self._socket.connect(address.path)
            else:
                plain = socket.create_connection((address.host, address.port), timeout=timeout_s)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                context = address.tls_context()
                self._socket = (
                    context.wrap_socket(plain, server_hostname=address.host) if context else plain
                )
        except OSError as error:
            raise StoreUnreachable(f"{self._label}: cannot connect: {error}") from error
        try:
            for command in address.greeting(name, address.login()):
                self._send(encode(command))
                check_greeting(self._label, str(command[0]), self._reply())
        except StoreError:
            self.close()
            raise

    def __enter__(self) -> BulkRedis:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, *args: Arg) -> Any:
        """Send one command; an error reply is raised."""
        self._send(encode(args))
        return _checked(self._reply(), command_name(args))

    def pages(self, key: str, after: str, upto: str, size: int) -> Iterator[list[Any]]:
        """The entries of a stream in (`after`, `upto`], a page at a time."""

        def request(start: str) -> None:
            self._send(encode(("XRANGE", key, start, upto, "COUNT", size)))

        request(f"({after}" if after else "-")
        while page := _checked(self._reply(), "XRANGE"):
            is_last = len(page) < size
            if not is_last:
                request(f"({page[-1][0].decode()}")
            yield page
            if is_last:
                return

    def send_all(self, packed: list[bytes]) -> list[Any]:
        """Send encoded commands in one write; returns the replies, or raises the first error."""
        self._send(b"".join(packed))
        return [_checked(self._reply(), "pipeline") for _ in packed]

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _send(self, packed: bytes) -> None:
        try:
            self._socket.sendall(packed)
        except OSError as error:
            # Some commands may have been sent, and the server may have executed them.
            raise ReplyLost(f"{self._label}: the connection broke: {error}") from error

    def _reply(self) -> Any:
        """The next reply; an error reply is a value."""
        try:
            reply = self._reader.gets()
            while reply is MORE:
                data = self._socket.recv(_RECEIVE_BYTES)
                if not data:
                    raise ReplyLost(f"{self._label}: the server closed the connection")
                self._reader.feed(data)
                reply = self._reader.gets()
        except (OSError, hiredis.ProtocolError) as error:
            raise ReplyLost(f"{self._label}: no answer came: {error}") from error
        return reply


def locate(address: RedisAddress, key: str) -> RedisAddress:
    """The primary that Sentinels name, or the node of a cluster that owns the key."""
    refusals = []
    for asked in address.servers():
        try:
            with BulkRedis(asked, timeout_s=_ASK_WITHIN_S) as client:
                if address.topology == "cluster":
                    ranges = slot_ranges(client.call("CLUSTER", "SLOTS"), asked.host)
                    slot = slot_of(key)
                    place = next((at for start, end, at in ranges if start <= slot <= end), None)
                else:
                    reply = client.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", address.service)
                    place = (reply[0].decode(), int(reply[1])) if reply else None
        except StoreError as error:
            refusals.append(str(error))
            continue
        if place is not None:
            return address.node(*place)
        refusals.append(f"{asked.label}: it knows no primary")
    raise StoreUnreachable(f"{address.label}: {'; '.join(refusals)}")
