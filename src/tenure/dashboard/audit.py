"""The audit log: who did what to which jobs, recorded before the response is sent.

The entries form a hash chain: each has a number, the hash of the entry before it, and a hash of
both and its own text. `verify` names the first entry that was altered, removed or inserted. It
cannot detect that the end of the log is missing; for that, the operator keeps the head elsewhere.
Pruning entries beyond `keep` adds an entry to the chain that names the last one removed. `verify`
believes it only if `keep` entries lie between the two, so a forged one hides no recent entry.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Annotated, Any

import msgspec
import structlog

from tenure.core.encoding import to_json
from tenure.core.errors import ReplyLost, StoreError, StoreUnreachable
from tenure.core.registry import open_part, parse_url
from tenure.dashboard.display import now_ms
from tenure.sql.engine import INBOX, Engine
from tenure.store.redis import Redis, ScriptFolder

_log = structlog.get_logger("tenure.audit")

LOST = "unknown: the answer of the store was lost"
IDS_MAX = 20
_KEEP = 10_000
_LOCAL = "local"
_PRUNE = "prune audit log"
_RESUME = "resume audit log"
_NOT_IN_TEXT = ("id", "seq", "hash")
_TRIES = 200
_PAGE = 1_000
_SEQ_MAX = 2**63 - 1
_ID_MAX = 2**64 - 1  # of both parts of an id in Redis
_NUMBER = re.compile(rb"[0-9]{1,18}")
_SCRIPTS = ScriptFolder("tenure.dashboard")
_POSITION = re.compile(r"([0-9]{1,20})(?:-([0-9]{1,20}))?")
_PRUNED = re.compile(r"through ([0-9]{1,18}) ([0-9a-f]*)")
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Up to the year 9999: later times cannot be formatted.
_Count = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_000)]


def _is_position(text: str) -> bool:
    """Whether a text can be the position of an entry in a store."""
    found = _POSITION.fullmatch(text)
    return found is not None and all(int(part or 0) < 2**64 for part in found.groups())


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One action. `who` is the id of the key, "local" without one; `whose` are the owners of the
    objects, `ids` the first 20 objects.

    `id` is the position in the store, `seq` the number in the chain (0 for an entry without one).
    """

    ts_ms: _Count
    who: str
    action: str
    queue: str = ""
    whose: tuple[str, ...] = ()
    ids: tuple[str, ...] = ()
    jobs: _Count = 0
    search: str = ""
    outcome: str = ""
    id: str = ""
    seq: int = 0
    hash: str = ""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """An entry as it is stored; `hash` is the hash of `seq`, `prev` and `entry`."""

    seq: int
    prev: str
    hash: str
    entry: bytes
    id: str = ""

    @property
    def is_sound(self) -> bool:
        """Whether the hash matches the content."""
        return self.hash == digest(self.seq, self.prev, self.entry)

    @property
    def line(self) -> bytes:
        """The line of an export: one JSON object. An entry that is not JSON becomes a string."""
        try:
            msgspec.json.decode(self.entry)
            entry: Any = msgspec.Raw(self.entry)
        except _UNREADABLE:
            entry = self.entry.decode(errors="replace")
        shown = {"seq": self.seq, "prev": self.prev, "hash": self.hash, "entry": entry}
        return msgspec.json.encode(shown) + b"\n"

    def read(self) -> AuditEntry:
        """The entry; for one that cannot be decoded, an entry that says so."""
        try:
            entry = msgspec.json.decode(self.entry, type=AuditEntry)
        except _UNREADABLE:
            text = self.entry.decode(errors="replace")[:200]
            entry = AuditEntry(ts_ms=0, who="", action="unreadable", outcome=text)
        return msgspec.structs.replace(entry, id=self.id, seq=self.seq, hash=self.hash)


class ChainHead(msgspec.Struct, frozen=True):
    """The end of a chain: last number and hash, position of the last entry, number of entries."""

    seq: int = 0
    hash: str = ""
    id: str = ""
    size: int = 0


class ChainCheck(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check. `problem` is "" for a sound chain; `at` is the number of the entry.

    `unchained` is the number of entries before the chain, which have no hash.
    """

    entries: int = 0
    first: int = 0
    seq: int = 0
    head: str = ""
    unchained: int = 0
    at: int = 0
    problem: str = ""


def digest(seq: int, prev: str, entry: bytes) -> str:
    """The hash of an entry: SHA-256 of number, previous hash and text, one per line."""
    return hashlib.sha256(b"%d\n%b\n%b" % (seq, prev.encode(), entry)).hexdigest()


def read_export(lines: Iterable[bytes]) -> list[Link]:
    """The entries of an export, as `Link.line` wrote them."""

    class Line(msgspec.Struct):
        seq: int
        prev: str
        hash: str
        entry: msgspec.Raw

    read = (msgspec.json.decode(line, type=Line) for line in lines if line.strip())
    return [
        Link(seq=each.seq, prev=each.prev, hash=each.hash, entry=bytes(each.entry)) for each in read
    ]


def verify(
    links: Sequence[Link], *, head: str = "", whole: bool = True, keep: int = _KEEP
) -> ChainCheck:
    """Check a chain from its oldest entry on; `whole` is False for a part, such as an export.

    `head` is the hash of an earlier head of the log: its entry must still exist. `keep` is the
    setting of the gateways; an entry about pruning that left fewer entries is not theirs.
    """
    chain = [link for link in links if link.hash]
    begun = links.index(chain[0]) if chain else len(links)
    prunings = _prunings(chain)
    start = max((named for seq, named in prunings if seq - named[0] > keep), default=(0, ""))
    if chain and not whole:
        start = chain[0].seq - 1, chain[0].prev
    at, problem = _first_problem(links[begun:], *start)
    doubtful = [seq for seq, named in prunings if problem and named[0] >= at > start[0]]
    if whole and doubtful:
        problem += (
            f"; entry {doubtful[0]} calls that pruning, but gateways keep {keep} entries. If "
            "gateway.audit_keep was smaller then, verify with TENURE_GATEWAY_AUDIT_KEEP set to that"
        )
    last = chain[-1] if chain else Link(seq=0, prev="", hash="", entry=b"")
    if not problem and head and head != start[1] and all(link.hash != head for link in chain):
        at = last.seq + 1
        problem = f"the end was altered, removed, or pruned: no entry has the hash {head}"
    return ChainCheck(
        entries=len(links),
        first=chain[0].seq if chain else 0,
        seq=last.seq,
        head=last.hash,
        unchained=begun,
        at=at,
        problem=problem,
    )


def _prunings(chain: Sequence[Link]) -> list[tuple[int, tuple[int, str]]]:
    """The entries about pruning: their number, and number and hash of the last pruned entry."""
    found = []
    for link in chain:
        if _PRUNE.encode() in link.entry and (entry := link.read()).action == _PRUNE:
            named = _PRUNED.fullmatch(entry.outcome)
            if named is not None:
                found.append((link.seq, (int(named[1]), named[2])))
    return found


def _first_problem(links: Sequence[Link], seq: int, prev: str) -> tuple[int, str]:
    """The number of the first entry that was changed, and what happened to it."""
    before: str | None = None  # the hash before `prev`
    for link in links:
        if not link.hash:
            return seq + 1, f"an entry without a hash was inserted after entry {seq}"
        if link.seq < 1:
            return seq + 1, f"an entry without a readable number follows entry {seq}"
        if link.seq != seq + 1 and link.is_sound:
            if link.seq <= seq:
                return link.seq, f"another entry {link.seq} was inserted after entry {seq}"
            until = f" to {link.seq - 1}" if link.seq > seq + 2 else ""
            return seq + 1, f"entry {seq + 1}{until} was removed"
        if link.prev == before:
            return seq, f"entry {seq} was inserted: the next one was written without it"
        if before is not None and link.prev != prev and link.is_sound:
            return seq, f"entry {seq} was altered: the next one has another hash of it"
        if link.prev != prev or not link.is_sound:
            return seq + 1, f"entry {seq + 1} was altered"
        seq, before, prev = link.seq, prev, link.hash
    return 0, ""


class AuditLog(ABC):
    """A chain of entries; subclasses store it. Belongs to one event loop."""

    def __init__(self, *, keep: int = _KEEP) -> None:
        self._keep = keep
        self._head: ChainHead | None = None
        self._lock = asyncio.Lock()
        self._missed = ""

    async def check(self) -> None:
        """Raise `StoreError` before an action if its entry could not be stored.

        After an entry was lost, an entry that says so must be stored first. If the store does not
        answer, nothing is raised here: the store of the queue decides then.
        """
        try:
            if self._missed:
                outcome = f"not stored: {self._missed}"
                entry = AuditEntry(ts_ms=now_ms(), who="tenure", action=_RESUME, outcome=outcome)
                await self.add(entry)
                self._missed = ""
            else:
                await self._read_head()
        except (StoreUnreachable, ReplyLost):
            return
        except StoreError as error:
            raise StoreError(
                f"the audit log takes no entry, so nothing is done: {error}"
            ) from error

    async def record(
        self,
        who: str,
        action: str,
        *,
        queue: str = "",
        whose: Iterable[str] = (),
        ids: Sequence[str] = (),
        jobs: int | None = None,
        search: str = "",
        outcome: str = "",
    ) -> None:
        """Record an action that has been done, here and in the log of the process.

        If the entry cannot be stored, only the log of the process has it, and `check` refuses the
        next action. That log also has the hash of each entry, so it can serve as the kept head.
        """
        entry = AuditEntry(
            ts_ms=now_ms(),
            who=who or _LOCAL,
            action=action,
            queue=queue,
            whose=tuple(sorted({owner or _LOCAL for owner in whose})[:IDS_MAX]),
            ids=tuple(ids[:IDS_MAX]),
            jobs=len(ids) if jobs is None else jobs,
            search=search,
            outcome=outcome,
        )
        _log.info("action", **msgspec.to_builtins(entry))
        try:
            link = await self.add(entry)
            _log.info("audit_stored", seq=link.seq, hash=link.hash)
        except Exception as error:  # the action is done, and an error must not hide that
            self.missed(action)
            _log.error("audit_not_stored", error=str(error), **msgspec.to_builtins(entry))

    def missed(self, action: str) -> None:
        """Note that the entry of an action could not be stored."""
        self._missed = action

    @asynccontextmanager
    async def recorded(self, who: str, action: str, **what: Any) -> AsyncGenerator[dict[str, Any]]:
        """Record the action of the block, which may add fields to the entry.

        The block does not run if the log cannot store entries. If the reply of the store was lost,
        the action may have been done, and the entry says so. An action that failed in another way
        changed nothing and has no entry.
        """
        entry = dict(what)
        await self.check()
        try:
            yield entry
        except ReplyLost:
            await self.record(who, action, **entry | {"outcome": LOST})
            raise
        await self.record(who, action, **entry)

    async def add(self, entry: AuditEntry) -> Link:
        """Append one entry; it is stored when this returns."""
        async with self._lock:
            head, self._head = self._head or await self._read_head(), None
            for _ in range(_TRIES):
                if head.size > self._keep + self._keep // 10:
                    head = await self._prune()
                link, after = await self._append(entry, head)
                if link is not None:
                    self._head = after
                    return link
                head = after
        raise StoreError(f"the audit log went on {_TRIES} times before an entry could be added")

    @abstractmethod
    async def list(self, *, before: str = "", limit: int = 100) -> list[AuditEntry]:
        """The newest first; `before` is the id of the last one seen, "" for the newest."""

    async def links(self) -> AsyncIterator[Link]:
        """All stored entries, oldest first."""
        after = ""
        while page := await self._read(after, _PAGE):
            for link in page:
                yield link
            after = page[-1].id

    async def close(self) -> None:
        """Close what the log has opened."""
        self._head = None

    @abstractmethod
    async def _read_head(self) -> ChainHead:
        """The current end of the chain."""

    @abstractmethod
    async def _read(self, after: str, count: int) -> Sequence[Link]:
        """`count` entries after a position ("" for the first), oldest first."""

    @abstractmethod
    async def _store(self, link: Link, head: ChainHead, pruned: str) -> str:
        """Store an entry and remove those up to the position `pruned`, atomically.

        Returns the position of the entry, "" if the log does not end with `head` any more.
        """

    async def _append(
        self, entry: AuditEntry, head: ChainHead, pruned: Sequence[Link] = ()
    ) -> tuple[Link | None, ChainHead]:
        """Append if the log still ends with `head`; returns the entry, and the new end."""
        fields = msgspec.to_builtins(entry)
        text = to_json({key: value for key, value in fields.items() if key not in _NOT_IN_TEXT})
        seq = head.seq + 1
        link = Link(seq=seq, prev=head.hash, hash=digest(seq, head.hash, text), entry=text)
        position = await self._store(link, head, pruned[-1].id if pruned else "")
        if position:
            after = ChainHead(seq, link.hash, position, head.size + 1 - len(pruned))
            return msgspec.structs.replace(link, id=position), after
        now = await self._read_head()
        if now.seq < head.seq:  # another program has cut the log: leave a visible gap
            _log.error("audit_log_cut", seq=now.seq, expected=head.seq, hash=head.hash)
            now = msgspec.structs.replace(now, seq=head.seq, hash=head.hash)
        return None, now

    async def _prune(self) -> ChainHead:
        """Remove the oldest entries, unless another gateway did; returns the new end."""
        head = await self._read_head()
        for _ in range(_TRIES):
            oldest = await self._read("", max(head.size - self._keep, 1))
            if head.size <= self._keep or not oldest:
                break
            entry = AuditEntry(
                ts_ms=now_ms(),
                who="tenure",
                action=_PRUNE,
                outcome=f"through {oldest[-1].seq} {oldest[-1].hash}",
            )
            stored, head = await self._append(entry, head, oldest)
            if stored is not None:
                break
        return head


class MemoryAudit(AuditLog):
    """In the memory of this process."""

    def __init__(self, *, keep: int = _KEEP) -> None:
        super().__init__(keep=keep)
        self._links: list[Link] = []

    async def list(self, *, before: str = "", limit: int = 100) -> list[AuditEntry]:
        newest = [link.read() for link in reversed(self._links)]
        return [each for each in newest if not before or each.id < before][:limit]

    async def _read_head(self) -> ChainHead:
        last = self._links[-1] if self._links else Link(seq=0, prev="", hash="", entry=b"")
        return ChainHead(last.seq, last.hash, last.id, len(self._links))

    async def _read(self, after: str, count: int) -> Sequence[Link]:
        return [link for link in self._links if link.id > after][:count]

    async def _store(self, link: Link, head: ChainHead, pruned: str) -> str:
        stored = msgspec.structs.replace(link, id=f"{link.seq:015d}")
        self._links = [*(each for each in self._links if each.id > pruned), stored]
        return stored.id


class RedisAudit(AuditLog):
    """In the Redis of the queue, shared by all its gateways."""

    def __init__(self, redis: Redis, *, prefix: str = "", keep: int = _KEEP) -> None:
        super().__init__(keep=keep)
        self._redis = redis
        self._key = f"{prefix}tenure:audit"

    async def list(self, *, before: str = "", limit: int = 100) -> list[AuditEntry]:
        # Reads `before` too and drops it: Redis refuses an exclusive end before 0-1.
        found = await self._newest(before if _is_position(before) else "+", limit + 1)
        return [link.read() for link in found if link.id != before][:limit]

    async def _newest(self, end: str, count: int) -> Sequence[Link]:
        rows: Any = await self._redis.call("XREVRANGE", self._key, end, "-", "COUNT", count)
        return [_read_stream_entry(row) for row in rows]

    async def _read_head(self) -> ChainHead:
        size = int(await self._redis.call("XLEN", self._key))
        position, end = "", "+"
        while found := await self._newest(end, _PAGE if position else 1):
            position = position or found[0].id
            for link in found:
                if link.hash and link.seq:  # others have no chain or are unreadable
                    return ChainHead(link.seq, link.hash, position, size)
            if found[-1].id == end:
                break
            end = found[-1].id
        return ChainHead(id=position, size=size)

    async def _read(self, after: str, count: int) -> Sequence[Link]:
        if after == f"{_ID_MAX}-{_ID_MAX}":
            return []
        begin = _next_id(after) if after else "-"
        rows: Any = await self._redis.call("XRANGE", self._key, begin, "+", "COUNT", count)
        return [_read_stream_entry(row) for row in rows]

    async def _store(self, link: Link, head: ChainHead, pruned: str) -> str:
        fields = (link.seq, link.prev, link.hash, link.entry)
        oldest = _next_id(pruned) if pruned else ""
        position = await self._redis.run(_SCRIPTS["audit"], [self._key], [head.id, *fields, oldest])
        return position.decode() if position else ""


def _read_stream_entry(row: Any) -> Link:
    position, fields = row
    named = dict(zip(fields[::2], fields[1::2], strict=False))
    seq = named.get(b"n", b"")
    prev, own = (named.get(name, b"").decode(errors="replace") for name in (b"p", b"h"))
    number = int(seq) if _NUMBER.fullmatch(seq) else 0
    return Link(seq=number, prev=prev, hash=own, entry=named.get(b"e", b""), id=position.decode())


def _next_id(position: str) -> str:
    time_ms, _, number = position.partition("-")
    if int(number or 0) < _ID_MAX:
        return f"{time_ms}-{int(number or 0) + 1}"
    return f"{min(int(time_ms) + 1, _ID_MAX)}-0"


class SqlAudit(AuditLog):
    """In the database of the queue, shared by all its gateways."""

    def __init__(self, engine: Engine, *, keep: int = _KEEP) -> None:
        super().__init__(keep=keep)
        self._engine = engine

    async def list(self, *, before: str = "", limit: int = 100) -> list[AuditEntry]:
        is_own = _is_position(before) and before.isdecimal()
        last = min(int(before) - 1, _SEQ_MAX) if is_own else _SEQ_MAX
        rows = await self._engine.run(INBOX, "audit_list", through=last, count=limit)
        return [_read_row(row).read() for row in rows]

    async def close(self) -> None:
        await self._engine.close()

    async def _read_head(self) -> ChainHead:
        row = (await self._engine.run(INBOX, "audit_head"))[0]
        return ChainHead(row["number"], str(row["hash"]), str(row["seq"]), row["size"])

    async def _read(self, after: str, count: int) -> Sequence[Link]:
        position = int(after) if after else -_SEQ_MAX
        rows = await self._engine.run(INBOX, "audit_read", after=position, count=count)
        return [_read_row(row) for row in rows]

    async def _store(self, link: Link, head: ChainHead, pruned: str) -> str:
        rows = await self._engine.run(
            INBOX,
            "audit_add",
            number=link.seq,
            prev=link.prev,
            hash=link.hash,
            entry=link.entry.decode(),
            pruned=int(pruned) if pruned else -_SEQ_MAX,
        )
        return str(rows[0]["seq"]) if rows else ""


def _read_row(row: Any) -> Link:
    return Link(
        seq=row["number"] or 0,
        prev=str(row["prev"]),
        hash=str(row["hash"]),
        entry=str(row["entry"]).encode(errors="surrogateescape"),
        id=str(row["seq"]),
    )


def open_audit(queue_url: str, side: tuple[Redis, str] | None, *, keep: int = _KEEP) -> AuditLog:
    """The audit log of a queue; `side` is its Redis and key prefix, if it has one."""
    url = parse_url(queue_url)
    if side is not None:
        return RedisAudit(side[0], prefix=side[1], keep=keep)
    if url.store.startswith(("sqlite", "postgres", "libsql")):
        return SqlAudit(open_part(queue_url, "database"), keep=keep)
    return MemoryAudit(keep=keep)
