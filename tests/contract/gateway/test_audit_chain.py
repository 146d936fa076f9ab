"""The audit log as a chain: raw changes to the real stores are found, and named by their entry."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from structlog.testing import capture_logs

from tenure.cli.console import run
from tenure.dashboard.audit import (
    AuditEntry,
    AuditLog,
    ChainCheck,
    Link,
    digest,
    open_audit,
    read_export,
    verify,
)
from tenure.gateway.keyrings import open_side_store
from tenure.gateway.keys import MemoryKeyRing
from tenure.gateway.server import serving
from tenure.gateway.settings import GatewaySettings
from tenure.store.redis import Redis
from tests.contract.adapters import Servers
from tests.contract.gateway.web import Web
from tests.contract.inbox_stage import migrated

Row = dict[str, Any]
_SCHEMA = f"audit_{os.getpid()}"


class Shelf:
    """The log of one store: opened as gateways do, and rewritten as an intruder would."""

    def __init__(self, url: str, rewrite: Callable[[list[Row]], Awaitable[None]]) -> None:
        self.url = url
        self.rewrite = rewrite
        self._stack = AsyncExitStack()

    def log(self, keep: int = 10_000) -> AuditLog:
        side = open_side_store(self.url, "test")
        log = open_audit(self.url, side, keep=keep)
        self._stack.push_async_callback(log.close)
        if side is not None:
            self._stack.push_async_callback(side[0].close)
        return log

    async def links(self) -> list[Link]:
        return [link async for link in self.log().links()]

    async def verified(self, head: str = "", keep: int = 10_000) -> ChainCheck:
        return verify(await self.links(), head=head, keep=keep)

    async def rows(self) -> list[Row]:
        return [
            {"number": link.seq, "prev": link.prev, "hash": link.hash, "entry": link.entry}
            for link in await self.links()
        ]

    async def close(self) -> None:
        await self._stack.aclose()


def _redis_shelf(server: str) -> Shelf:
    namespace = f"t{secrets.token_hex(4)}:"

    async def rewrite(rows: list[Row]) -> None:
        redis, key = Redis(server), f"{namespace}tenure:audit"
        await redis.call("DEL", key)
        for at, row in enumerate(rows, 1):
            fields = ["e", row["entry"]]
            if row["number"]:
                fields += ["n", row["number"], "p", row["prev"], "h", row["hash"]]
            await redis.call("XADD", key, f"{at}-0", *fields)
        await redis.close()

    return Shelf(f"streams+{server}?namespace={namespace}", rewrite)


_ADD = "INSERT INTO audit_log (number, prev, hash, entry) VALUES "


def _sqlite_shelf(folder: Path) -> Shelf:
    async def rewrite(rows: list[Row]) -> None:
        with closing(sqlite3.connect(folder / "jobs.db")) as file, file:
            file.execute("DELETE FROM audit_log")
            for row in rows:
                file.execute(f"{_ADD} (?, ?, ?, ?)", _values(row))

    return Shelf(f"inbox+sqlite:///{folder}/jobs.db", rewrite)


async def _postgres_shelf(server: str) -> Shelf:
    async def rewrite(rows: list[Row]) -> None:
        connection = await asyncpg.connect(server, server_settings={"search_path": _SCHEMA})
        await connection.execute("DELETE FROM audit_log")
        for row in rows:
            await connection.execute(f"{_ADD} ($1, $2, $3, $4)", *_values(row))
        await connection.close()

    await migrated(server, _SCHEMA)
    await rewrite([])
    return Shelf(f"inbox+{server}?schema={_SCHEMA}", rewrite)


def _values(row: Row) -> tuple[Any, ...]:
    return row["number"] or None, row["prev"], row["hash"], row["entry"].decode()


@pytest.fixture(params=["redis", "sqlite", "postgres"])
async def shelf(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> AsyncGenerator[Shelf]:
    if request.param == "redis":
        made = _redis_shelf(servers.redis())
    elif request.param == "sqlite":
        made = _sqlite_shelf(tmp_path)
    else:
        made = await _postgres_shelf(servers.postgres())
    yield made
    await made.close()


async def _filled(log: AuditLog, count: int = 10) -> list[Link]:
    return [await log.add(AuditEntry(ts_ms=at, who="k1", action=f"a{at}")) for at in range(count)]


def _rehashed(row: Row, **changes: Any) -> Row:
    new = row | changes
    return new | {"hash": digest(new["number"], new["prev"], new["entry"])}


def _forged(after: Row) -> Row:
    text = b'{"ts_ms":1,"who":"nobody","action":"forged"}'
    return _rehashed({"number": after["number"] + 1, "prev": after["hash"], "entry": text})


def _renumbered(rows: list[Row], by: int) -> list[Row]:
    return [row | {"number": row["number"] + by} for row in rows]


_OTHER = b'{"ts_ms":4,"who":"k2","action":"a4"}'
_BARE = {"number": 0, "prev": "", "hash": "", "entry": _OTHER}
# What is done to the entries 1 to 10, which entry is named, and with which word.
TAMPERED: dict[str, tuple[Callable[[list[Row]], list[Row]], int, str]] = {
    "text": (lambda r: [*r[:4], r[4] | {"entry": _OTHER}, *r[5:]], 5, "altered"),
    "text and hash": (lambda r: [*r[:4], _rehashed(r[4], entry=_OTHER), *r[5:]], 5, "altered"),
    "first text": (lambda r: [_rehashed(r[0], entry=_OTHER), *r[1:]], 1, "altered"),
    "hash": (lambda r: [*r[:4], r[4] | {"hash": "0" * 64}, *r[5:]], 5, "altered"),
    "no hash": (lambda r: [*r[:4], _BARE, *r[5:]], 5, "inserted"),
    "number": (lambda r: [*r[:4], r[4] | {"number": 50}, *r[5:]], 5, "altered"),
    "one gone": (lambda r: [*r[:4], *r[5:]], 5, "removed"),
    "some gone": (lambda r: [*r[:4], *r[7:]], 5, "5 to 7 was removed"),
    "first gone": (lambda r: r[2:], 1, "1 to 2 was removed"),
    "gone, renumbered": (lambda r: [*r[:4], *_renumbered(r[5:], -1)], 5, "altered"),
    "one more": (lambda r: [*r[:5], _forged(r[4]), *_renumbered(r[5:], 1)], 6, "inserted"),
    "one more, bare": (lambda r: [*r[:5], _BARE, *r[5:]], 6, "inserted"),
    "swapped": (lambda r: [*r[:4], r[5], r[4], *r[6:]], 5, "removed"),
}


@pytest.mark.parametrize("how", TAMPERED)
async def test_the_first_entry_that_is_not_as_written_is_named(shelf: Shelf, how: str) -> None:
    await _filled(shelf.log())
    whole = await shelf.verified()
    assert (whole.problem, whole.entries, whole.first, whole.seq) == ("", 10, 1, 10)
    tamper, at, word = TAMPERED[how]
    await shelf.rewrite(tamper(await shelf.rows()))
    found = await shelf.verified()
    assert found.at == at, found
    assert word in found.problem


async def test_a_missing_end_is_found_by_the_head_that_was_kept(shelf: Shelf) -> None:
    head = (await _filled(shelf.log()))[-1].hash
    assert (await shelf.verified()).head == head
    assert not (await shelf.verified(head)).problem
    rows = await shelf.rows()
    for changed in (rows[:7], [*rows[:9], _rehashed(rows[9], entry=_OTHER)]):
        await shelf.rewrite(changed)
        assert not (await shelf.verified()).problem
        assert head in (await shelf.verified(head)).problem
    await shelf.rewrite([])
    assert head in (await shelf.verified(head)).problem


async def test_gateways_that_write_at_once_make_one_chain(shelf: Shelf) -> None:
    logs = [shelf.log() for _ in range(4)]

    async def fill(name: str, log: AuditLog) -> None:
        for at in range(15):
            await log.add(AuditEntry(ts_ms=at, who=name, action="a", ids=(f"{name}-{at}",)))

    await asyncio.gather(*(fill(f"g{at}", log) for at, log in enumerate(logs)))
    await asyncio.gather(
        *(logs[0].add(AuditEntry(ts_ms=1, who="x", action="b")) for _ in range(10))
    )
    found = await shelf.verified()
    assert (found.problem, found.entries, found.seq) == ("", 70, 70)
    named = [link.read().ids for link in await shelf.links() if link.read().ids]
    assert sorted(named) == sorted((f"g{at}-{each}",) for at in range(4) for each in range(15))


async def test_pruning_leaves_a_checkpoint_in_the_chain(shelf: Shelf) -> None:
    first, second = shelf.log(keep=20), shelf.log(keep=20)
    written = [*await _filled(first, 40), *await _filled(second, 15), *await _filled(first, 15)]
    found = await shelf.verified(written[-1].hash, keep=20)
    assert not found.problem
    assert 20 <= found.entries <= 23
    links = await shelf.links()
    known = await shelf.verified(links[0].prev, keep=20)
    assert not known.problem, "the last one pruned is known"
    assert "pruned" in (await shelf.verified(written[0].hash, keep=20)).problem
    await shelf.rewrite((await shelf.rows())[1:])
    found = await shelf.verified(keep=20)
    assert (found.at, "removed" in found.problem) == (links[0].seq, True)


async def test_a_forged_pruning_hides_no_entry_that_gateways_would_have_kept(shelf: Shelf) -> None:
    written = await _filled(shelf.log(), 30)
    kept, last = (await shelf.rows())[10:], written[-1]
    claim = {"ts_ms": 1, "who": "tenure", "action": "prune audit log"}
    claim["outcome"] = f"through 10 {written[9].hash}"
    text = msgspec.json.encode(claim)
    forged = {"number": 31, "prev": last.hash, "hash": digest(31, last.hash, text), "entry": text}
    await shelf.rewrite([*kept, forged])
    for head in ("", last.hash):
        found = await shelf.verified(head, keep=21)
        assert found.at == 1
        assert found.problem.startswith("entry 1 to 10 was removed; entry 31 calls that pruning")
    assert not (await shelf.verified(last.hash, keep=20)).problem, "this is what a gateway does"


async def test_gateways_that_prune_at_once_keep_as_many_as_they_should(shelf: Shelf) -> None:
    logs = [shelf.log(keep=20) for _ in range(3)]
    await asyncio.gather(*(_filled(log, 40) for log in logs))
    found = await shelf.verified(keep=20)
    assert not found.problem
    assert 20 <= found.entries <= 23
    assert sum(link.read().action.startswith("a") for link in await shelf.links()) >= 12


async def test_entries_from_before_the_chain_are_told_apart(shelf: Shelf) -> None:
    await shelf.log().list()  # makes the table
    await shelf.rewrite([_BARE, _BARE])
    await _filled(shelf.log(), 3)
    found = await shelf.verified()
    assert (found.problem, found.unchained, found.entries, found.seq) == ("", 2, 5, 3)
    listed = await shelf.log().list(limit=10)
    assert [(each.action, each.seq) for each in listed] == [
        ("a2", 3), ("a1", 2), ("a0", 1), ("a4", 0), ("a4", 0),
    ]  # fmt: skip
    assert await shelf.log().list(before=listed[1].id, limit=2) == listed[2:4]


async def test_a_log_that_was_cut_under_a_running_gateway_shows_the_gap(shelf: Shelf) -> None:
    log = shelf.log()
    await _filled(log)
    await shelf.rewrite((await shelf.rows())[:6])
    with capture_logs() as said:
        await log.add(AuditEntry(ts_ms=1, who="k1", action="later"))
    found = await shelf.verified()
    assert (found.at, found.problem) == (7, "entry 7 to 10 was removed")
    if "redis" in shelf.url:  # the others refuse a number twice, so there was nothing to notice
        assert [line["event"] for line in said] == ["audit_log_cut"]


async def test_an_entry_that_is_no_json_harms_no_other(shelf: Shelf) -> None:
    await _filled(shelf.log(), 3)
    rows = await shelf.rows()
    await shelf.rewrite([rows[0], rows[1] | {"entry": b"{"}, rows[2]])
    assert [each.action for each in await shelf.log().list()] == ["a2", "unreadable", "a0"]
    exported = read_export(link.line for link in await shelf.links())
    assert verify(exported, whole=False).at == 2


async def test_an_export_over_http_is_for_admins_and_verifies(shelf: Shelf) -> None:
    await _filled(shelf.log(), 6)
    ring = MemoryKeyRing()
    keys = {scope: (await ring.create([scope], scope))[1] for scope in ("observe", "admin")}
    async with serving(GatewaySettings(queues=(shelf.url,), port=0), ring=ring) as running:
        sees, acts = (Web(running.url, {"x-api-key": keys[who]}) for who in ("observe", "admin"))
        assert (await sees.get("/api/audit/export")).status == 403
        reply = await acts.get("/api/audit/export?after=1&through=5")
        assert reply.headers["content-type"].startswith("text/plain")
        part = read_export(reply.body.splitlines())
        assert [link.seq for link in part] == [2, 3, 4, 5]
        assert not verify(part, whole=False).problem
        name = running.gateway.queues[0].name
        assert (await acts.post(f"/api/queues/{name}/pause")).status == 200
        newest = (await sees.get("/api/audit?limit=1")).json["entries"][0]
        assert (newest["action"], newest["seq"]) == ("pause", 7)
        everything = read_export((await acts.get("/api/audit/export")).body.splitlines())
        assert everything[-1].hash == newest["hash"]
        assert (await acts.get("/api/audit/export?limit=2")).body.count(b"\n") == 2
        assert (await acts.get("/api/audit/export?after=x")).status == 422


async def test_the_command_verifies_and_exports_the_log(
    shelf: Shelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = (await _filled(shelf.log(), 6))[-1].hash
    copy = str(tmp_path / "audit.jsonl")

    async def said(*words: str) -> tuple[int, str]:
        code = await asyncio.to_thread(run, ["audit", *words])
        return code, "".join(capsys.readouterr())

    here = ("--queue", shelf.url)
    code, text = await said("verify", "--head", head.upper(), *here)
    assert (code, "1 to 6" in text, head in text) == (0, True, True)
    code, text = await said("export", "--first", "2", "--last", "5", "-o", copy, *here)
    assert (code, "4 entries" in text) == (0, True)
    code, text = await said("verify", "--file", copy, "--json")
    assert (code, '"ok":true' in text, '"first":2' in text) == (0, True, True)
    code, text = await said("export", "--since", "1970-01-02", *here)
    assert (code, "0 entries" in text) == (0, True)
    assert (await said("export", "--until", "1970-01-02", *here))[1].count('"seq"') == 6
    await shelf.rewrite([*(await shelf.rows())[:3], *(await shelf.rows())[4:]])
    code, text = await said("verify", *here)
    assert (code, "entry 4 was removed" in text) == (8, True)
    Path(copy).write_text('{"seq": 1')
    assert (await said("verify", "--file", copy))[0] == 2
    assert (await said("verify", "--queue", "memory://"))[0] == 2
