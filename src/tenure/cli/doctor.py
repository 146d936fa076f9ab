"""`tenure doctor`: check this machine, the stores and the queues; each problem has a remedy."""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import sqlite3
import sys
import time
from pathlib import Path
from typing import Any

import click

from tenure.cli.config import Config, load_config
from tenure.cli.console import Exit, answer, json_option, paint, queues_option
from tenure.cli.gateway_client import fetch
from tenure.core.errors import ServerError, StoreError, TenureError
from tenure.core.journal import StreamFormat
from tenure.core.portable import portable_counts
from tenure.core.registry import (
    Finding,
    QueueUrl,
    contract_of,
    journal_format,
    journal_urls,
    make_finding,
    open_ledger,
    open_part,
    parse_url,
    paused_finding,
)
from tenure.core.seam import Counts
from tenure.store.redis import Redis
from tenure.store.redis.placement import placement_findings

_MARKS = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "problem": ("PROBLEM", "red")}
_DOWN = ("reachable", "folder", "database file")  # a problem here means that no queue can answer
_SQLITE_MIN = (3, 35, 0)  # the first with RETURNING
_REDIS_MIN, _REDIS_RECOMMENDED = (6, 2), (7, 0)
_POSTGRES_MIN = 130_000
_SKEW_MS_NOTE, _SKEW_MS_PROBLEM = 1_000, 30_000
_WAITING_MS_MAX = 600_000
_FREE_BYTES_MIN = 1 << 30
_OPEN_S_MAX = 300


@click.command("doctor")
@queues_option
@json_option
def doctor_command(queue_urls: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, the queues and their stores; exit code 8 if there is a problem.

    \b
    tenure doctor
    tenure doctor --queue 'inbox+postgresql://user@host/db' --json
    """
    config = load_config()
    findings = _machine_findings(config)
    for url in config.queue_urls(queue_urls):
        found = asyncio.run(queue_findings(url))
        # Queues may share a store: its findings are shown once.
        findings += [finding for finding in found if finding not in findings]
    for finding in findings:
        answer(as_json, finding, _line(finding))
    return Exit.PROBLEMS if any(f.level == "problem" for f in findings) else Exit.OK


def _line(finding: Finding) -> str:
    mark, colour = _MARKS[finding.level]
    line = f"{paint(mark, colour)}  {finding.check:<17} {finding.detail}"
    if finding.remedy:
        line += f"\n{' ' * 27}{paint('-> ' + finding.remedy, 'bold', sys.stdout)}"
    return line


# This machine.


def _machine_findings(config: Config) -> list[Finding]:
    java, unknown = shutil.which("java"), config.unknown_variables
    return [
        make_finding(
            "python",
            platform.python_version(),
            bad=sys.version_info < (3, 11),
            remedy="install Python 3.11 or newer",
        ),
        make_finding(
            "sqlite",
            sqlite3.sqlite_version,
            bad=sqlite3.sqlite_version_info < _SQLITE_MIN,
            level="note",
            remedy="queues on SQLite need 3.35; use a newer Python build",
        ),
        make_finding(
            "java",
            java or "not found",
            bad=not java,
            level="note",
            remedy="only the pipeline needs it: pip install 'tenure[spark]' brings one",
        ),
        _server_program(),
        _port(config.text("gateway.host"), config.integer("gateway.port")),
        make_finding(
            "settings",
            f"unknown: {', '.join(unknown)}" if unknown else "every TENURE_* variable is known",
            bad=bool(unknown),
            level="note",
            remedy="`tenure config show --json` lists the right names",
        ),
    ]


def _server_program() -> Finding:
    from tenure.store.embedded.programs import redis_program

    try:
        return Finding("ok", "redis program", str(redis_program()))
    except TenureError as error:
        remedy = "`tenure up` and `bench` need one: apt-get install redis-server, "
        remedy += "or pip install 'tenure[embedded]'"
        return Finding("note", "redis program", str(error), remedy)


def _port(host: str, port: int) -> Finding:
    if _is_free(host, port):
        return Finding("ok", "gateway port", f"{host}:{port} is free")
    if _is_gateway(f"http://{f'[{host}]' if ':' in host else host}:{port}"):
        return Finding("ok", "gateway port", f"a gateway answers on {host}:{port}")
    taken = f"{host}:{port} is taken by something that is no gateway"
    remedy = f"stop it, or choose another port: --port {port + 1} or TENURE_GATEWAY_PORT"
    return Finding("problem", "gateway port", taken, remedy)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _is_gateway(url: str) -> bool:
    try:
        return fetch(f"{url}/livez", 2)[1] == b"ok\n"
    except OSError:
        return False


# A queue, after its store.


async def queue_findings(url: str) -> list[Finding]:
    """The findings of a store, and of its queue if the store can answer."""
    parsed = parse_url(url)
    kind = parsed.store.partition("://")[0]
    if kind.startswith("http"):
        return await asyncio.to_thread(_remote_findings, parsed)
    if kind.startswith(("redis", "valkey")):
        found = await _redis_queue_findings(url)
    elif kind.startswith("postgres"):
        found = await postgres_findings(open_part(url, "database").database.url)
    elif kind in ("sqlite", "libsql"):
        found = sqlite_findings(parsed.store)
    else:
        found = []
    if any(f.level == "problem" and f.check in _DOWN for f in found):
        return found
    names = {finding.check for finding in found}
    return [*found, *(f for f in await _ledger_findings(url) if f.check not in names)]


async def _ledger_findings(url: str) -> list[Finding]:
    """Findings from the counts of any queue; a single one if the queue does not answer."""
    name = parse_url(url).safe
    ledger = open_ledger(url)
    begun = time.monotonic()
    try:
        counts = await ledger.counts()
    except TenureError as error:
        remedy = "start the store, or name another queue; after an upgrade: tenure db migrate"
        return [Finding("problem", "queue", f"{name}: {error}", remedy)]
    finally:
        await ledger.close()
    took_ms = (time.monotonic() - begun) * 1000
    return [Finding("ok", "queue", f"{name} in {took_ms:.1f} ms"), *_count_findings(name, counts)]


def _count_findings(name: str, counts: Counts) -> list[Finding]:
    states = portable_counts(parse_url(name).contract, counts.states)
    waiting, failed = states["waiting"], states["failed"]
    return [
        make_finding(
            "workers",
            f"{counts.workers}, and {waiting} jobs wait",
            bad=bool(waiting and not counts.workers and not counts.paused),
            remedy=f"start one: tenure worker app.py --queue '{name}'",
        ),
        paused_finding(counts.paused, f"tenure resume --queue '{name}'"),
        make_finding(
            "oldest waiting",
            f"{counts.oldest_waiting_ms / 1000:.0f} s",
            bad=counts.oldest_waiting_ms > _WAITING_MS_MAX,
            level="note",
            remedy="add workers or slots: tenure worker --concurrency, --processes",
        ),
        make_finding(
            "dead letters",
            f"{failed} jobs failed for good",
            bad=bool(failed),
            level="note",
            remedy=f"tenure dead --queue '{name}' groups them by error",
        ),
    ]


def clock_finding(skew_ms: float) -> Finding:
    """`skew_ms` is positive when the store is ahead."""
    return make_finding(
        "clock",
        f"the store is {abs(skew_ms):.0f} ms {'ahead of' if skew_ms > 0 else 'behind'} us",
        bad=abs(skew_ms) > _SKEW_MS_NOTE,
        level="problem" if abs(skew_ms) > _SKEW_MS_PROBLEM else "note",
        remedy="leases go by the store's clock, but ages shown here do not: set up NTP",
    )


# A gateway, as a worker reaches it.


def _remote_findings(url: QueueUrl) -> list[Finding]:
    """`/livez` and `/readyz` of the gateway; blocking."""
    found: list[Finding] = []
    store, name = url.store, url.safe
    for check, path, remedy in (
        ("gateway", "/livez", f"start it: tenure gateway --queue {url.contract}+sqlite:///jobs.db"),
        ("gateway ready", "/readyz?verbose", "its store does not answer: tenure doctor there"),
    ):
        try:
            status, _ = fetch(f"{_base(store)}{path}", 5)
        except (OSError, ValueError) as error:
            return [*found, Finding("problem", check, f"{name}: {error}", remedy)]
        detail = f"{name} answers {status}"
        found.append(make_finding(check, detail, bad=status != 200, remedy=remedy))
    return found


def _base(store: str) -> str:
    """The gateway's address, without key and options.

    >>> _base("http://:key@host:8470/?streams=a")
    'http://host:8470'
    """
    scheme, _, rest = store.partition("://")
    authority = rest.partition("?")[0].partition("/")[0]
    return f"{scheme}://{authority.rpartition('@')[2]}"


# A Redis server, and what the contract itself checks.


async def _redis_queue_findings(url: str) -> list[Finding]:
    parsed = parse_url(url)
    contract = contract_of(parsed)
    _, store = contract.read_options(parsed)
    redis = Redis(store, name="tenure-doctor", connect_timeout_ms=2_000, timeout_ms=5_000)
    try:
        findings = await _redis_findings(redis, parsed.safe)
        if findings[0].level != "ok":
            return findings
        if redis.is_cluster:
            formats = [journal_format(each) for each in journal_urls(url)]
            keys = [each.key for each in formats if isinstance(each, StreamFormat)]
            findings += await placement_findings(redis, parsed.safe, keys)
        if contract.doctor is not None:
            findings += await contract.doctor(parsed, redis)
        return findings
    finally:
        await redis.close()


async def _redis_findings(redis: Redis, name: str) -> list[Finding]:
    """Findings from INFO, CONFIG and TIME; a single one if the server is unreachable."""
    try:
        before_ms = time.time() * 1000
        clock = await redis.call("TIME")
        after_ms = time.time() * 1000
        lines = (await redis.call("INFO")).decode(errors="replace").splitlines()
    except StoreError as error:
        remedy = "start it (`tenure up` brings one along) or name another with --queue"
        return [Finding("problem", "reachable", f"{name}: {error}", remedy)]
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    skew_ms = int(clock[0]) * 1000 + int(clock[1]) / 1000 - (before_ms + after_ms) / 2
    role = info.get("role", "?")
    remedy = "use the address of the primary; a replica takes no writes"
    return [
        Finding("ok", "reachable", f"{name} in {after_ms - before_ms:.1f} ms"),
        version_finding(info),
        make_finding("role", role, bad=role != "master", remedy=remedy),
        _append_only_file(info),
        *await _redis_settings(redis),
        clock_finding(skew_ms),
    ]


def version_finding(info: dict[str, str]) -> Finding:
    """6.2 is required (XAUTOCLAIM, XPENDING IDLE), 7 is recommended."""
    text = info.get("valkey_version") or info.get("redis_version", "0")
    # Valkey reports redis_version 7.2, so the comparison holds for both.
    number = tuple(int(part) for part in info.get("redis_version", "0.0").split(".")[:2])
    if number < _REDIS_MIN:
        remedy = "upgrade to 6.2 or newer, better 7 or newer"
        return Finding("problem", "redis version", text, remedy)
    remedy = "upgrade to 7 or newer: it counts waiting entries itself"
    return make_finding(
        "redis version", text, bad=number < _REDIS_RECOMMENDED, level="note", remedy=remedy
    )


def _append_only_file(info: dict[str, str]) -> Finding:
    check = "append-only file"
    if info.get("aof_enabled") != "1":
        remedy = "redis-cli config set appendonly yes, then config rewrite"
        return Finding("problem", check, "off", f"jobs die with the server: {remedy}")
    status = info.get("aof_last_write_status", "ok")
    remedy = "the last write failed: look at the disk and the server's log"
    return make_finding(check, f"on, last write {status}", bad=status != "ok", remedy=remedy)


async def _redis_settings(redis: Redis) -> list[Finding]:
    values: dict[str, str] = {}
    for name in ("appendfsync", "maxmemory-policy", "maxmemory"):
        try:
            pair = await redis.call("CONFIG", "GET", name)
        except ServerError as error:
            remedy = "ask the operator of the server for appendfsync and maxmemory-policy"
            return [Finding("note", "server settings", f"not readable: {error}", remedy)]
        values[name] = pair[1].decode() if pair else "?"
    fsync, policy, limit = values.values()
    meaning = ": a power cut may lose the last second, a crash of Redis nothing"
    return [
        make_finding(
            "appendfsync",
            fsync + (meaning if fsync == "everysec" else ""),
            bad=fsync not in ("everysec", "always"),
            remedy="redis-cli config set appendfsync everysec (or always), then config rewrite",
        ),
        make_finding(
            "eviction",
            f"{policy}, maxmemory {limit or '0'}",
            bad=policy != "noeviction",
            level="problem" if limit not in ("", "0") else "note",
            remedy="redis-cli config set maxmemory-policy noeviction, "
            "or jobs vanish when memory is full",
        ),
    ]


# SQL stores.


def sqlite_findings(store: str) -> list[Finding]:
    """The file, its folder and its disk. A missing file is made on first use."""
    path = Path(store.partition("://")[2].removeprefix("/").partition("?")[0])
    folder = path.parent
    if not folder.is_dir():
        return [Finding("problem", "folder", f"{folder} is not there", f"mkdir -p {folder}")]
    free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    found = [
        make_finding(
            "folder",
            f"{folder.absolute()} {'can' if writable else 'cannot'} be written",
            bad=not writable,
            remedy="SQLite writes its log beside the file: give this user the folder",
        ),
        make_finding(
            "disk",
            f"{free / (1 << 30):.1f} GB free",
            bad=free < _FREE_BYTES_MIN,
            level="note",
            remedy="a full disk stops every write: make room, or set keep_ms and journal_days",
        ),
    ]
    return [*found, _database_file(path)] if path.exists() else found


def _database_file(path: Path) -> Finding:
    try:
        connection = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=5)
        try:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
        finally:
            connection.close()
    except sqlite3.Error as error:
        remedy = "is it a database of this project? restore it from a copy, or name another"
        return Finding("problem", "database file", f"{path}: {error}", remedy)
    remedy = "it is set on the first write; on a network disk it cannot be: use a local one"
    return make_finding("database file", f"{path}, log {mode}", bad=mode != "wal", remedy=remedy)


async def postgres_findings(store: str) -> list[Finding]:
    """Findings from the server's settings; a single one if it is unreachable."""
    from tenure.store.postgres import Postgres

    database = Postgres(store, schema="public", pinned=False)
    try:
        shares = await database.shares_sessions()
        before_ms = time.time() * 1000
        (row,) = await database.fetch(
            "SELECT current_setting('server_version_num')::int AS number,"
            " current_setting('server_version') AS version, current_setting('fsync') AS fsync,"
            " extract(epoch FROM clock_timestamp()) * 1000 AS now_ms,"
            " pg_is_in_recovery() AS replica, coalesce((SELECT max(extract(epoch FROM now() -"
            " xact_start)) FROM pg_stat_activity WHERE datname = current_database()), 0) AS open_s",
            [],
        )
        skew_ms = float(row["now_ms"]) - (before_ms + time.time() * 1000) / 2
    except TenureError as error:
        remedy = "start it, or correct user, host and database in the queue's URL"
        return [Finding("problem", "reachable", f"PostgreSQL: {error}", remedy)]
    finally:
        await database.close()
    pooler = make_finding(
        "sessions",
        "shared with others by a pooler" if shares else "our own",
        bad=shares,
        level="note",
        remedy="there are no notices, so workers poll: add notify_address=host:port of the server "
        "to the URL, or pooling=session if the pooler's pool_mode is session",
    )
    return [*server_findings(dict(row)), pooler, clock_finding(skew_ms)]


def server_findings(row: dict[str, Any]) -> list[Finding]:
    """Version, durability, role and long transactions."""
    open_s = float(row["open_s"])
    return [
        make_finding(
            "postgres version",
            row["version"],
            bad=row["number"] < _POSTGRES_MIN,
            remedy="upgrade to 13 or newer",
        ),
        make_finding(
            "fsync",
            row["fsync"],
            bad=row["fsync"] != "on",
            remedy="a crash may lose or break everything: ALTER SYSTEM SET fsync = on, then reload",
        ),
        make_finding(
            "role",
            "a replica" if row["replica"] else "primary",
            bad=row["replica"],
            remedy="a replica takes no writes: name the primary",
        ),
        make_finding(
            "open transactions",
            f"the oldest is {open_s:.0f} s old",
            bad=open_s > _OPEN_S_MAX,
            level="note",
            remedy="it holds back the journal and the clean-up: find it in pg_stat_activity",
        ),
    ]
