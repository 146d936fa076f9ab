"""Which node of a cluster owns the slot of a key.

A queue has all its keys in one slot, so a client mostly speaks to one primary. It asks any node
where that primary is before it dials, and again whenever a connection is lost or a server says that
it is not the one.

What a server answers, and what the client does. In every case but the last nothing was executed:

    MOVED            remembers the owner of the slot, and sends again there
    ASK              sends again to the named node, after ASKING, and remembers nothing
    TRYAGAIN         the slot is moving: sends again with growing pauses, then StoreUnreachable
    CLUSTERDOWN, LOADING, MASTERDOWN, READONLY, UNBLOCKED
                     drops the connection: StoreUnreachable; the next call looks and dials anew
    no answer        ReplyLost; the client never sends such a call again

While a slot moves from one node to another, its keys are partly here and partly there. A script
that reaches keys by name would stop in the middle at the source and work on half of the data at the
target. A server checks declared keys before it starts a script: if one of several does not exist,
and the slot is moving, the answer is TRYAGAIN. So with every script a client of a cluster declares
one more key of the slot, which never exists (`guard_key`), and the script runs whole or not at all.
"""

from __future__ import annotations

import asyncio
import binascii
import contextlib
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from tenure.core.errors import ServerError, StoreError, StoreUnreachable
from tenure.store.redis.address import Arg, RedisAddress
from tenure.store.redis.connection import Connection, Connector, Dialer, Node
from tenure.store.redis.wire import UNREADABLE, command_name, encode, place_in
from tenure.store.resend import run_step

# -- slots -----------------------------------------------------------------------------------------

SLOTS = 16_384
_KEYLESS = frozenset(
    {"ACL", "CLIENT", "CLUSTER", "COMMAND", "CONFIG", "DBSIZE", "ECHO", "EXEC", "INFO", "MULTI"}
    | {"PING", "ROLE", "SCAN", "SCRIPT", "TIME", "WAIT"}
)
_KEY_SECOND = frozenset({"MEMORY", "OBJECT", "XGROUP", "XINFO"})
_STREAMS = {"XREAD": 1, "XREADGROUP": 4}  # after the names of group and consumer
_SCRIPTS = frozenset({"EVAL", "EVALSHA"})


def _tag(key: bytes) -> bytes:
    """The part of a key that decides its slot: what is in its first braces, or all of it."""
    start = key.find(b"{")
    end = key.find(b"}", start + 1)
    return key[start + 1 : end] if -1 < start < end - 1 else key


def slot_of(key: Arg) -> int:
    """The slot of a key.

    >>> slot_of("123456789"), slot_of("{user1000}.following") == slot_of("{user1000}.followers")
    (12739, True)
    """
    return binascii.crc_hqx(_tag(_bytes(key)), 0) % SLOTS


def guard_key(key: Arg) -> bytes:
    """A key of the same slot that never exists; see the top of this module."""
    return b"{%b}:never-a-key" % _tag(_bytes(key))


def key_of(command: Sequence[Arg]) -> Arg | None:
    """The first key of a command, None if it has none."""
    name = command_name(command).upper()
    if name in _SCRIPTS:
        return command[3] if int(command[2]) else None
    if name in _KEYLESS:
        return None
    if name in _STREAMS:
        words = [command_name([word]).upper() for word in command]
        return command[words.index("STREAMS", _STREAMS[name]) + 1]
    at = 2 if name in _KEY_SECOND else 1
    return command[at] if len(command) > at else None


def _bytes(key: Arg) -> bytes:
    return key if isinstance(key, bytes) else str(key).encode()


class Redirect(NamedTuple):
    """MOVED and ASK name the node of a slot, TRYAGAIN none. The command was not executed."""

    kind: str
    slot: int = -1
    host: str = ""
    port: int = 0


def redirect_of(reply: Any) -> Redirect | None:
    """The redirection that an error reply is.

    >>> redirect_of(ServerError("", reply="MOVED 3999 [::1]:6381"))
    Redirect(kind='MOVED', slot=3999, host='::1', port=6381)
    """
    if not isinstance(reply, ServerError):
        return None
    words = str(reply.reply).split(" ")
    if words[0] == "TRYAGAIN":
        return Redirect("TRYAGAIN")
    if words[0] not in ("MOVED", "ASK") or len(words) < 3:
        return None
    host, _, port = words[2].rpartition(":")
    try:
        slot, place = int(words[1]), place_in(host.strip("[]").encode(), port)
    except UNREADABLE:
        return None
    return Redirect(words[0], slot, *place)


# -- cluster ---------------------------------------------------------------------------------------

_PATIENCE_S = 3.0
_SILENT_S = 2.0
_PAUSE_S_FIRST = 0.005
_PAUSE_S_MAX = 0.2
_ASKING = encode(("ASKING",))


class _Pending(NamedTuple):
    """A command of a pipeline that has no answer yet; `ask` is the node that ASK named."""

    at: int
    packed: bytes
    slot: int
    ask: Node | None = None


class _Pauses:
    """Growing pauses between the sendings of one call, until its time is up."""

    def __init__(self) -> None:
        self._until = asyncio.get_running_loop().time() + _PATIENCE_S
        self._pause_s = 0.0  # the first redirection is followed at once

    async def next(self, refused: Any) -> None:
        """Wait; raises StoreUnreachable for the server's last refusal if there is no time left."""
        if asyncio.get_running_loop().time() > self._until:
            raise StoreUnreachable(
                f"Redis Cluster: the slot is moving ({refused.reply})", reply=refused.reply
            )
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))
        self._pause_s = min(_PAUSE_S_MAX, max(_PAUSE_S_FIRST, self._pause_s * 2))


class Cluster:
    """The owners of slots, and the connections to them."""

    def __init__(self, address: RedisAddress, dialer: Dialer) -> None:
        self._address = address
        self._dialer = dialer
        self._nodes: dict[tuple[str, int], Node] = {}
        self._suspect: set[Node] = set()  # could not be dialled
        self._starts: list[int] = []  # the first slots of the ranges, and their owners
        self._ranges: list[tuple[int, tuple[str, int]]] = []
        self._places: list[tuple[str, int]] = []  # all nodes, replicas too: each can be asked
        self._owners: dict[int, Node] = {}  # of slots that were used; MOVED writes here
        self._home = 0  # the slot that was used last: keyless commands go there
        self._asking: asyncio.Task[None] | None = None

    async def call(self, args: Sequence[Arg], packed: bytes) -> Any:
        """The reply to one command; an error reply is raised."""
        slot = self._slot(args)
        connection = await self._connection(slot)
        try:
            return await connection.send(packed)
        except ServerError as error:
            again = self._again(_Pending(0, packed, slot), error)
            if again is None:
                raise
            (reply,) = await self._exchange([again], [error])
            if isinstance(reply, StoreError):
                raise reply from None
            return reply

    async def pipeline(self, commands: Sequence[Sequence[Arg]], packed: list[bytes]) -> list[Any]:
        """The replies to many commands; an error reply is a value."""
        slots = self._slots(commands)
        if any(command[0] == "MULTI" for command in commands):
            return await self._transaction(packed, slots[0])
        pending = [_Pending(at, packed[at], slot) for at, slot in enumerate(slots)]
        return await self._exchange(pending, [None] * len(packed))

    async def block(
        self, commands: Sequence[Sequence[Arg]], packed: Sequence[bytes], wait_ms: int
    ) -> list[Any]:
        """The replies to commands of which the first blocks; redirections are values.

        If the first was redirected, it pauses, so that a caller that comes again at once waits.
        """
        replies = await self._block(self._slots(commands)[0], packed, wait_ms)
        if redirect_of(replies[0]):
            for reply in replies:
                self._learn(redirect_of(reply))
            await asyncio.sleep(min(_PAUSE_S_MAX, wait_ms / 1000))
        return replies

    async def block_whole(
        self,
        commands: Sequence[Sequence[Arg]],
        packed: Sequence[bytes],
        wait_ms: int,
        behind: Sequence[bytes],
    ) -> list[Any]:
        """As `Node.block`, for commands of one slot that run whole or not at all."""
        slot = self._slots(commands)[0]
        return await self._whole(lambda: self._block(slot, packed, wait_ms, behind), len(packed))

    async def _block(
        self, slot: int, packed: Sequence[bytes], wait_ms: int, behind: Sequence[bytes] = ()
    ) -> list[Any]:
        node = await self._node(slot)
        try:
            return await node.block(packed, wait_ms, behind)
        except StoreUnreachable:
            self._suspect.add(node)
            raise

    async def primaries(self) -> dict[str, Connection]:
        """A connection to every primary, by its address."""
        await self._ask_map()
        places = sorted({place for _, place in self._ranges})
        return {_text(place): await self._at(*place).ready() for place in places}

    async def place_of(self, key: Arg) -> tuple[int, str]:
        """The slot of a key, and the address of the node that owns it."""
        await self._ask_map()
        slot = slot_of(key)
        place = self._owner_of(slot)
        return slot, _text(place) if place else "no node"

    async def watch(self) -> None:
        """Ask again when an owner is silent, because another one may have taken over.

        Its connection would be given up only after `timeout_ms`. Runs until cancelled.
        """
        while True:
            await asyncio.sleep(_SILENT_S)
            if any(node.is_silent(_SILENT_S) for node in self._nodes.values()):
                with contextlib.suppress(StoreUnreachable):
                    await self._ask_map()

    async def close(self) -> None:
        """Close all connections."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    # Sending.

    def _slot(self, args: Sequence[Arg]) -> int:
        key = key_of(args)
        if key is not None:
            self._home = slot_of(key)
        return self._home

    def _slots(self, commands: Sequence[Sequence[Arg]]) -> list[int]:
        """The slot of each command; one without a key goes with the first that has one."""
        keys = [key_of(command) for command in commands]
        self._home = next((slot_of(key) for key in keys if key is not None), self._home)
        return [self._home if key is None else slot_of(key) for key in keys]

    async def _transaction(self, packed: list[bytes], slot: int) -> list[Any]:
        """MULTI ... EXEC to one node."""

        async def send() -> list[Any]:
            return await (await self._connection(slot)).send_many(packed)

        return await self._whole(send, len(packed))

    async def _whole(self, send: Callable[[], Awaitable[list[Any]]], count: int) -> list[Any]:
        """Send until none of the first `count` commands, which run whole or not, is redirected."""
        pauses = _Pauses()
        while True:
            replies = await send()
            refused = next((reply for reply in replies[:count] if redirect_of(reply)), None)
            if refused is None:
                return replies
            self._learn(redirect_of(refused))
            await pauses.next(refused)

    async def _exchange(self, pending: list[_Pending], replies: list[Any]) -> list[Any]:
        """Send commands until each has a reply that is no redirection; fills `replies`."""
        pauses, executed = _Pauses(), False
        while pending:
            await run_step(self._send_round(pending, replies), executed_before=executed)
            again = [self._again(each, replies[each.at]) for each in pending]
            executed = executed or None in again
            pending = [each for each in again if each is not None]
            if pending:
                refused = replies[pending[0].at]
                await run_step(pauses.next(refused), executed_before=executed)
        return replies

    async def _send_round(self, pending: list[_Pending], replies: list[Any]) -> None:
        for number, (node, batch) in enumerate(await self._batches(pending)):
            found = await run_step(self._send(node, batch), executed_before=number > 0)
            for each, reply in zip(batch, found, strict=True):
                replies[each.at] = reply

    def _again(self, each: _Pending, reply: Any) -> _Pending | None:
        """The command as it is sent again; None if the reply is no redirection."""
        redirect = redirect_of(reply)
        if redirect is None:
            return None
        self._learn(redirect)
        ask = self._target(redirect) if redirect.kind == "ASK" else None
        return each._replace(ask=ask)

    async def _batches(self, pending: list[_Pending]) -> list[tuple[Node, list[_Pending]]]:
        """The commands by node, in their order; those after ASK by themselves."""
        batches: dict[tuple[Node, bool], list[_Pending]] = {}
        for each in pending:
            node = each.ask or await self._node(each.slot)
            batches.setdefault((node, each.ask is not None), []).append(each)
        return [(node, batch) for (node, _), batch in batches.items()]

    async def _send(self, node: Node, batch: list[_Pending]) -> list[Any]:
        connection = await self._ready(node)
        if batch[0].ask is None:
            replies: list[Any] = await connection.send_many([each.packed for each in batch])
            return replies
        doubled = [packed for each in batch for packed in (_ASKING, each.packed)]
        answers: list[Any] = await connection.send_many(doubled)
        return answers[1::2]

    # The map.

    async def _connection(self, slot: int) -> Connection:
        node = self._owners.get(slot)
        connection = node.main if node is not None else None
        if connection is None or connection.lost:
            return await self._ready(await self._node(slot))
        return connection

    async def _ready(self, node: Node) -> Connection:
        try:
            connection = await node.ready()
        except StoreError:
            self._suspect.add(node)
            raise
        self._suspect.discard(node)
        return connection

    async def _node(self, slot: int) -> Node:
        """The owner of a slot; asks for it if unknown, or if the connection to it was lost."""
        node = self._known(slot)
        if node is None or node in self._suspect or node.is_lost:
            await self._ask_map()
            node = self._known(slot)
        if node is None:
            raise StoreUnreachable(f"{self._address.label}: no node owns slot {slot}")
        return node

    def _known(self, slot: int) -> Node | None:
        node = self._owners.get(slot)
        if node is None and (place := self._owner_of(slot)):
            node = self._owners[slot] = self._at(*place)
        return node

    def _owner_of(self, slot: int) -> tuple[str, int] | None:
        """The owner by the map."""
        if not self._ranges:
            return None
        end, place = self._ranges[max(0, bisect_right(self._starts, slot) - 1)]
        return place if slot <= end else None

    def _host_of(self, slot: int) -> str:
        """The host of the node that a slot's commands go to."""
        node = self._known(slot)
        return next((host for (host, _), each in self._nodes.items() if each is node), "")

    def _at(self, host: str, port: int) -> Node:
        node = self._nodes.get((host, port))
        if node is None:
            connector = Connector(self._dialer, self._address.node(host, port))
            node = self._nodes[host, port] = Node(connector, self._dialer.timeout_ms)
        return node

    def _learn(self, redirect: Redirect | None) -> None:
        if redirect is not None and redirect.kind == "MOVED":
            self._owners[redirect.slot] = self._target(redirect)

    def _target(self, redirect: Redirect) -> Node:
        # A server that does not know its own name leaves it out.
        return self._at(redirect.host or self._host_of(redirect.slot), redirect.port)

    async def _ask_map(self) -> None:
        """Ask who owns which slot; callers that come meanwhile share the question."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._read_map())
            self._asking.add_done_callback(self._asked)
        asking = self._asking
        try:
            await asyncio.shield(asking)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if asking.cancelled() and not (caller and caller.cancelling()):
                raise StoreUnreachable(f"{self._address.label}: the client was closed") from None
            raise

    def _asked(self, task: asyncio.Task[None]) -> None:
        self._asking = None
        if not task.cancelled():
            task.exception()  # retrieved, even if every caller was cancelled

    async def _read_map(self) -> None:
        places = list({*self._places, *self._nodes, *self._address.hosts})
        # Those that failed last; the others in any order, so that clients do not all ask the same.
        random.shuffle(places)
        places.sort(key=self._failed)
        asked = [self._address.node(*place) for place in places]
        try:
            _, (ranges, places) = await self._dialer.ask_first(
                asked, ("CLUSTER", "SLOTS"), lambda address, reply: _read_slots(reply, address.host)
            )
        except StoreUnreachable as error:
            await asyncio.sleep(_PAUSE_S_MAX * random.uniform(0.5, 1.0))
            raise StoreUnreachable(f"{self._address.label}: no node answers: {error}") from None
        self._starts = [start for start, _, _ in ranges]
        self._ranges = [(end, place) for _, end, place in ranges]
        self._places = places
        self._owners.clear()
        owners = {place for _, place in self._ranges}
        for place in [place for place in self._nodes if place not in owners]:
            node = self._nodes[place]
            if node.main is None or node.main.lost or node.is_silent(_SILENT_S):
                # It owns nothing any more: what waits there may wait for ever.
                del self._nodes[place]
                self._suspect.discard(node)
                node.drop("it is no primary of the cluster any more")

    def _failed(self, place: tuple[str, int]) -> bool:
        node = self._nodes.get(place)
        return node is not None and (node in self._suspect or node.is_lost)


def slot_ranges(reply: Any, asked: str) -> list[tuple[int, int, tuple[str, int]]]:
    """The ranges of CLUSTER SLOTS with their primaries; `asked` is the host that answered.

    Raises one of `UNREADABLE`.
    """
    return [(int(start), int(end), _place(primary, asked)) for start, end, primary, *_ in reply]


def _read_slots(reply: Any, asked: str) -> tuple[list[Any], list[tuple[str, int]]]:
    """The ranges in their order, and the places of all nodes."""
    places = [_place(node, asked) for _, _, *nodes in reply for node in nodes]
    return sorted(slot_ranges(reply, asked)), places


def _text(place: tuple[str, int]) -> str:
    return f"{place[0]}:{place[1]}"


def _place(node: Any, asked: str) -> tuple[str, int]:
    """Host and port of a node; one that does not know its own name has that by which we asked."""
    host, port = place_in(node[0] or b"", node[1])
    return host or asked, port
