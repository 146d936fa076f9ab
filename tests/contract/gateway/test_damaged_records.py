"""What a raw writer leaves in the store: other keys work, and no action goes without its entry."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path

import asyncpg
import pytest
from structlog.testing import capture_logs

from tenure.cli.console import run
from tenure.core.job import NewJob
from tenure.core.registry import open_queue
from tenure.dashboard.audit import AuditEntry, open_audit, verify
from tenure.gateway.keyrings import RedisKeyRing, open_side_store, open_sql_keyring
from tenure.gateway.keys import KeyRing
from tenure.gateway.limits import Quota
from tenure.sql.schema import SqliteMigrations, migrate
from tenure.store.redis import Redis
from tests.contract.adapters import Servers
from tests.contract.gateway.conftest import Site
from tests.contract.gateway.web import Web
from tests.contract.inbox_stage import migrated

LAST_ID = "18446744073709551615-18446744073709551615"
WILD: dict[str, tuple[str, dict[str, str]]] = {
    "a number of 5,000 digits": ("*", {"n": "9" * 5_000, "p": "x", "h": "y", "e": "{}"}),
    "a number of 18 digits": ("*", {"n": "9" * 18, "p": "x", "h": "y" * 64, "e": "{}"}),
    "a text that is deep": ("*", {"n": "4", "p": "x", "h": "y", "e": "[" * 100_000}),
    "a time of 400 digits": (
        "*",
        {"n": "4", "p": "x", "h": "y", "e": '{"ts_ms":%s,"who":"","action":"a"}' % ("9" * 400)},
    ),
    "a pruning of 5,000 digits": (
        "*",
        {
            "n": "4",
            "p": "x",
            "h": "y",
            "e": '{"ts_ms":1,"who":"","action":"prune audit log","outcome":"through %s a"}'
            % ("9" * 5_000),
        },
    ),
    "no known field": ("*", {"zz": "1"}),
    "the last id": (LAST_ID, {"n": "4", "p": "x", "h": "y", "e": "{}"}),
    "the last id, no known field": (LAST_ID, {"zz": "1"}),
}


async def _three_acts(web: Web, name: str) -> None:
    for verb in ("pause", "resume", "pause"):
        assert (await web.post(f"/api/queues/{name}/{verb}")).status == 200


@pytest.mark.parametrize("how", WILD)
async def test_a_wild_entry_is_reported_and_ends_no_audit_log(
    site: Site, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await site.gateway()
    web, name = Web(running.url), running.gateway.queues[0].name
    await _three_acts(web, name)
    key = f"{site.ns}tenure:audit"
    place, fields = WILD[how]
    await site.redis.call("XADD", key, place, *(word for pair in fields.items() for word in pair))
    await _three_acts(web, name)
    await _three_acts(Web((await site.gateway()).url), name)
    listed = (await web.get("/api/audit?limit=50")).json["entries"]
    assert [each["action"] for each in listed[:6]] == ["pause", "resume", "pause"] * 2
    assert len(listed) == 10
    code = await asyncio.to_thread(run, ["audit", "verify", "--queue", site.url()])
    said = "".join(capsys.readouterr())
    assert (code, "entry 3" in said or "entry 4" in said) == (8, True), said


async def test_a_log_whose_last_id_was_used_and_removed_goes_on(site: Site) -> None:
    running = await site.gateway()
    web, name = Web(running.url), running.gateway.queues[0].name
    await _three_acts(web, name)
    key = f"{site.ns}tenure:audit"
    await site.redis.call("XADD", key, LAST_ID, "x", "y")
    await site.redis.call("XDEL", key, LAST_ID)
    await _three_acts(web, name)
    log = open_audit(site.url(), (site.redis, site.ns))
    found = verify([link async for link in log.links()])
    assert (found.problem, found.entries) == ("", 6)


async def test_an_action_is_refused_before_it_is_done_when_the_log_takes_no_entry(
    site: Site,
) -> None:
    running = await site.gateway()
    web, name = Web(running.url), running.gateway.queues[0].name
    key = f"{site.ns}tenure:audit"
    await site.redis.call("SET", key, "not a stream")
    reply = await web.post(f"/api/queues/{name}/pause")
    assert reply.status == 503
    assert not (await site.ledger.counts()).paused
    await site.redis.call("DEL", key)
    assert (await web.post(f"/api/queues/{name}/pause")).status == 200
    assert (await site.ledger.counts()).paused


async def test_an_entry_that_was_not_stored_is_said_before_the_next_action(site: Site) -> None:
    log = open_audit(site.url(), (site.redis, site.ns))
    await log.add(AuditEntry(ts_ms=1, who="k", action="a"))
    log.missed("pause")
    await log.check()
    assert [(each.action, each.outcome) for each in await log.list(limit=1)] == [
        ("resume audit log", "not stored: pause")
    ]
    await log.check()
    assert len(await log.list()) == 2


NUMBERS = (2**63 - 1, 2**62 - 1, -5)


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
@pytest.mark.parametrize("number", NUMBERS)
async def test_a_wild_number_in_a_database_is_reported_and_ends_no_audit_log(
    servers: Servers, tmp_path: Path, engine: str, number: int
) -> None:
    wild = f"INSERT INTO audit_log (entry, number, prev, hash) VALUES ('{{', {number}, 'x', 'y')"
    if engine == "sqlite":
        url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    else:
        schema = f"wild{secrets.token_hex(4)}"
        await migrated(servers.postgres(), schema)
        url = f"inbox+{servers.postgres()}?schema={schema}"

    async def added() -> None:
        log = open_audit(url, None)
        for _ in range(3):
            await log.add(AuditEntry(ts_ms=1, who="k", action="a"))
        await log.close()

    await added()
    if engine == "sqlite":
        with closing(sqlite3.connect(tmp_path / "jobs.db")) as file, file:
            file.execute(wild)
    else:
        connection = await asyncpg.connect(servers.postgres())
        await connection.execute(f"SET search_path TO {schema}")
        await connection.execute(wild)
        await connection.execute(
            "INSERT INTO audit_log (seq, entry) OVERRIDING SYSTEM VALUE"
            " VALUES (9223372036854775807, '')"
        )
        await connection.close()
    for _ in range(3):
        await added()
    log = open_audit(url, None)
    found = verify([link async for link in log.links()])
    assert (found.at, bool(found.problem)) == (4, True), found
    actions = [each.action for each in await log.list(limit=50)]
    assert actions.count("a") == 12
    assert actions.count("unreadable") == len(actions) - 12 > 0
    await log.close()


async def test_no_writer_ends_the_places_of_a_sqlite_table(tmp_path: Path) -> None:
    url = f"inbox+sqlite:///{tmp_path}/jobs.db"
    queue = open_queue(url)
    log = open_audit(url, None)
    job = NewJob(task="transcode", payload=b"{}")
    assert (await queue.submit([job]))[0].accepted
    await log.add(AuditEntry(ts_ms=1, who="k", action="a"))
    with closing(sqlite3.connect(tmp_path / "jobs.db")) as file:
        for table in ("inbox_jobs", "job_journal", "audit_log"):
            with pytest.raises(sqlite3.IntegrityError, match="places_within_bounds"):
                file.execute(f"UPDATE {table} SET seq = 9223372036854775807")
        with pytest.raises(sqlite3.IntegrityError, match="places_within_bounds"):
            file.execute("INSERT INTO audit_log (seq, entry) VALUES (9223372036854775807, '')")
        with pytest.raises(sqlite3.IntegrityError, match="places_within_bounds"):
            file.execute(
                "INSERT INTO webhook_secrets (id, requester_id, secret, created_ms)"
                " VALUES (9223372036854775807, 'r', 's', 1)"
            )
        with pytest.raises(sqlite3.IntegrityError, match="places_within_bounds"):
            file.execute(_JOB)
    assert (await queue.submit([job]))[0].accepted
    await log.add(AuditEntry(ts_ms=1, who="k", action="a"))
    await queue.close()
    await log.close()


_JOB = (
    "INSERT INTO inbox_jobs"
    " (seq, job_id, queue, task, max_attempts, created_ms, updated_ms, payload) VALUES"
    " (9223372036854775807, 'wild', 'inbox', 'transcode', 3, 1, 1, '{}')"
)


@pytest.mark.parametrize("removed", [False, True])
async def test_a_sqlite_file_whose_places_were_ended_is_repaired(
    tmp_path: Path, removed: bool
) -> None:
    path = tmp_path / "jobs.db"
    await migrate(SqliteMigrations(path), "sqlite")
    with closing(sqlite3.connect(path)) as file, file:
        for table in ("inbox_jobs", "audit_log"):
            file.execute(f"DROP TRIGGER {table}_place_begin")
        file.execute(_JOB)
        file.execute("INSERT INTO audit_log (seq, entry) VALUES (9223372036854775806, '1')")
        file.execute("INSERT INTO audit_log (seq, entry) VALUES (9223372036854775807, '2')")
        if removed:
            file.execute("DELETE FROM inbox_jobs")
            file.execute("DELETE FROM audit_log")
    url = f"inbox+sqlite:///{path}"
    queue, log = open_queue(url), open_audit(url, None)
    assert (await queue.submit([NewJob(task="transcode", payload=b"{}")]))[0].accepted
    assert len(await queue.claim(5, wait_ms=0)) == (1 if removed else 2)
    await log.add(AuditEntry(ts_ms=1, who="k", action="a"))
    texts = [link.entry for link in [link async for link in log.links()]]
    assert texts[:-1] == ([] if removed else [b"1", b"2"])
    await queue.close()
    await log.close()


class Bench:
    """A ring in a real store, and raw changes to the records of one key in it."""

    def __init__(self, url: str, ring: KeyRing, put: Callable[..., Awaitable[None]]) -> None:
        self.url, self.ring, self.put = url, ring, put


@pytest.fixture(params=["redis", "sqlite", "postgres"])
async def bench(
    request: pytest.FixtureRequest, servers: Servers, tmp_path: Path
) -> AsyncGenerator[Bench]:
    async with AsyncExitStack() as stack:
        if request.param == "redis":
            yield await _redis_bench(servers.redis(), stack)
        else:
            yield await _sql_bench(request.param, servers, tmp_path, stack)


async def _redis_bench(server: str, stack: AsyncExitStack) -> Bench:
    namespace, redis = f"t{secrets.token_hex(4)}:", Redis(server)
    stack.push_async_callback(redis.close)

    async def put(key_id: str, *, quota: str = "", record: bool = False) -> None:
        if record:
            await redis.call("HSET", f"{namespace}tenure:keys", key_id, b"\xff\xfe{")
        if quota:
            await redis.call("HSET", f"{namespace}tenure:keys:quotas", key_id, quota)
            await redis.call("HSET", f"{namespace}tenure:keys:used", key_id, "NaN")

    url = f"streams+{server}?namespace={namespace}"
    side = open_side_store(url, "test")
    assert side is not None
    stack.push_async_callback(side[0].close)
    return Bench(url, RedisKeyRing(side[0], prefix=side[1]), put)


async def _sql_bench(name: str, servers: Servers, folder: Path, stack: AsyncExitStack) -> Bench:
    url, schema = f"inbox+sqlite:///{folder}/jobs.db", f"keys{secrets.token_hex(4)}"
    if name == "postgres":
        await migrated(servers.postgres(), schema)
        url = f"inbox+{servers.postgres()}?schema={schema}"

    async def run_sql(statement: str) -> None:
        if name == "postgres":
            connection = await asyncpg.connect(
                servers.postgres(), server_settings={"search_path": schema}
            )
            await connection.execute(statement)
            await connection.close()
        else:
            with closing(sqlite3.connect(folder / "jobs.db")) as file, file:
                file.execute(statement)

    async def put(key_id: str, *, quota: str = "", record: bool = False) -> None:
        if record:
            await run_sql(
                "INSERT INTO api_keys (key_id, name, scopes, secret_h, created_ms, expires_ms)"
                f" VALUES ('{key_id}', 'n', '[[', 'x', 1, 9223372036854775807)"
            )
        if quota:
            await run_sql(f"UPDATE api_keys SET quota = '{quota}' WHERE key_id = '{key_id}'")

    ring = open_sql_keyring(url)
    stack.push_async_callback(ring.close)
    return Bench(url, ring, put)


async def test_a_junk_key_hides_no_other_and_opens_nothing(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    key, _ = await bench.ring.create(["admin"], "good")
    await bench.put("evil", record=True)
    with capture_logs() as said:
        assert [each.id for each in await bench.ring.list()] == [key.id]
        assert await bench.ring.find("evil") is None
    assert {line["event"] for line in said} == {"key_unreadable"}
    code = await asyncio.to_thread(run, ["keys", "ls", "--queue", bench.url])
    assert (code, key.id in capsys.readouterr().out) == (0, True)


@pytest.mark.parametrize(
    "quota", ["[[", '{"depth":-9}', '{"rate_per_s":-1e308}', '{"depth":1e400}', "[" * 100_000]
)
async def test_a_junk_or_negative_quota_is_what_every_key_may(bench: Bench, quota: str) -> None:
    key, _ = await bench.ring.create(["admin"], "good")
    await bench.put(key.id, quota=quota)
    found = await bench.ring.find(key.id)
    assert found is not None
    assert found.quota == Quota()
    assert [(each.id, each.quota) for each in await bench.ring.list()] == [(key.id, Quota())]


async def test_records_beside_the_keys_of_a_wrong_type_refuse_no_key(site: Site) -> None:
    ring = RedisKeyRing(site.redis, prefix=site.ns)
    key, text = await ring.create(["admin"], "good")
    for name in ("used", "quotas"):
        await site.redis.call("SET", f"{site.ns}tenure:keys:{name}", "x")
    web = Web((await site.gateway()).url, {"x-api-key": text})
    assert (await web.get("/api/queues")).status == 200
    assert [each.id for each in await ring.list()] == [key.id]
    assert await ring.revoke(key.id)
