"""The Redis client: calls, pipelines, scripts and blocking commands of one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any

from tenure.core.errors import (
    NotReplicated,
    ServerError,
    StoreError,
    StoreUnreachable,
    UsageError,
)
from tenure.store.redis.address import Arg, RedisAddress, parse_address
from tenure.store.redis.cluster import Cluster, guard_key, key_of, redirect_of
from tenure.store.redis.connection import Connector, Dialer, Node
from tenure.store.redis.scripts import Script
from tenure.store.redis.sentinel import Sentinels
from tenure.store.redis.wire import (
    check_reply,
    command_name,
    encode,
    is_no_script,
    is_wrong_type,
)

# Submits that wait for replicas at the same time, each on a connection of its own.
_WAITING_MAX = 8


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
        self._replicating = asyncio.Semaphore(_WAITING_MAX)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def replicas(self) -> int:
        """How many replicas a replicated call waits for; 0 if the URL asks for none."""
        return self._address.replicas

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

    async def pipeline(
        self, commands: Sequence[Sequence[Arg]], *, replicated: bool = False
    ) -> list[Any]:
        """Send many commands in one write; an error reply is a value in the list of replies.

        On a cluster there is one write for each node, and MULTI ... EXEC is for keys of one slot.
        With `replicated` it is one MULTI ... EXEC, see `run`.
        """
        packed = [encode(command) for command in commands]
        if not packed:
            return []
        self._check_usable()
        if replicated and self._address.replicas:
            replies = await self._replicated(commands, packed)
        elif self._cluster is not None:
            replies = await self._cluster.pipeline(commands, packed)
        else:
            replies = await (await self._node.ready()).send_many(packed)
        if all(isinstance(reply, StoreUnreachable) for reply in replies):
            raise replies[0]  # the server is loading: it executed none of them
        return replies

    def declared_keys(self, keys: Sequence[str | bytes]) -> Sequence[str | bytes]:
        """The keys that a call of a script declares: on a cluster one more (`guard_key`)."""
        return keys if self._cluster is None else (*keys, guard_key(keys[0]))

    async def run(
        self,
        script: Script,
        keys: Sequence[str | bytes],
        args: Sequence[Arg],
        *,
        replicated: bool = False,
    ) -> Any:
        """Run a script by its hash or, if the server does not have it yet, by its source.

        With `replicated` it returns when as many replicas have its writes as the URL asks for, and
        raises `NotReplicated` if they do not in time. Such a call can be repeated.
        """
        _check_keys(script, keys)
        declared = self.declared_keys(keys)
        send = self._call_replicated if replicated and self._address.replicas else self.call
        try:
            try:
                return await send("EVALSHA", script.sha, len(declared), *declared, *args)
            except ServerError as error:
                if not is_no_script(error):
                    raise
            return await send("EVAL", script.source, len(declared), *declared, *args)
        except ServerError as error:
            error.operation = script.name
            if is_wrong_type(error):
                await self._name_keys(error, keys)
            raise

    async def _call_replicated(self, *args: Arg) -> Any:
        (reply,) = await self._replicated([args], [encode(args)])
        return check_reply(reply, command_name(args))

    async def _replicated(
        self, commands: Sequence[Sequence[Arg]], packed: Sequence[bytes]
    ) -> list[Any]:
        """The replies to commands that run whole or not at all, and then WAIT for the replicas.

        WAIT is about the last write of its connection, and holds up what comes after it. So the
        call has a connection to itself for that time. A call that is repeated may write nothing,
        and WAIT would not wait for what the first one wrote: so there is always one more write.
        """
        replicas, within_ms = self._address.replicas, self._address.replicas_ms
        mark = _mark_of(commands)
        behind = [encode(("SET", mark, "", "PX", 1)), encode(("WAIT", replicas, within_ms))]
        async with self._replicating:
            self._check_usable()
            if self._cluster is not None:
                replies = await self._cluster.block_whole(commands, packed, within_ms, behind)
            else:
                replies = await self._node.block(packed, within_ms, behind)
        if len(replies) == len(packed):  # one of them failed, so nothing followed
            return replies
        *replies, marked, have = replies
        refused = next((each for each in (marked, have) if isinstance(each, StoreError)), None)
        if refused is None and have >= replicas:
            return replies
        found = refused or f"{have} of {replicas} replicas have it after {within_ms} ms"
        raise NotReplicated(
            f"{self._address.label}: it is stored, but not as safely as replicas={replicas} asks "
            f"for ({found}); send it again under the same id or key, it is not stored twice",
            reply=refused.reply if refused else have,
        )

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
        primaries = (await cluster.primaries()).values() if cluster else [await self._node.ready()]
        for connection in primaries:
            cursor: Arg = 0
            while cursor != b"0":
                scan = ("SCAN", cursor, "MATCH", pattern, "COUNT", 1_000, *more)
                cursor, found = await connection.send(encode(scan))
                yield found

    @property
    def is_cluster(self) -> bool:
        """Whether the URL names a cluster."""
        return self._cluster is not None

    async def ask_primaries(self, *args: Arg) -> dict[str, Any]:
        """The answer of each primary of a cluster to a command, by its address."""
        self._check_usable()
        if self._cluster is None:
            raise UsageError(f"{self!r} is not a cluster")
        primaries = await self._cluster.primaries()
        return {name: await each.send(encode(args)) for name, each in primaries.items()}

    async def place_of(self, key: Arg) -> tuple[int, str]:
        """The slot of a key on a cluster, and the address of the node that owns it."""
        self._check_usable()
        if self._cluster is None:
            raise UsageError(f"{self!r} is not a cluster")
        return await self._cluster.place_of(key)

    async def block(self, *args: Arg, wait_ms: int) -> Any:
        """Send a blocking command on a connection of its own; None if it timed out.

        `wait_ms` is the command's own timeout, for our timer. Cancelling the caller closes the
        connection, so that no other caller gets the late reply.
        """
        (reply,) = await self._blocked([args], wait_ms)
        if self._cluster is not None and redirect_of(reply):
            return None  # its slot moved: for the caller the time is up
        return check_reply(reply, command_name(args))

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
            check_reply(waited, command_name(blocking))
        if isinstance(reply, ServerError) and (is_no_script(reply) or redirect_of(reply)):
            return await self.run(script, keys, args)
        return check_reply(reply, script.name)

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


def _mark_of(commands: Sequence[Sequence[Arg]]) -> str:
    """A key beside the first one of the commands, and in its slot."""
    return f"{_text(next(key for key in map(key_of, commands) if key is not None))}:replicated"


def _check_keys(script: Script, keys: Sequence[str | bytes]) -> None:
    if len(keys) != script.keys:
        raise UsageError(
            f"script {script.name} takes {script.keys} keys, {len(keys)} were given",
            operation=script.name,
        )
