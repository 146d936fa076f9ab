"""`tenure doctor`: look for what will hurt, and say what helps."""

from __future__ import annotations

import asyncio
import sys
from importlib import import_module
from typing import cast

import click
import msgspec

from tenure.cli.checks.finding import Finding
from tenure.cli.checks.machine import machine_findings
from tenure.cli.checks.queue import ledger_findings
from tenure.cli.checks.redis import redis_findings
from tenure.cli.checks.remote import remote_findings
from tenure.cli.checks.sql import postgres_findings, sqlite_findings
from tenure.cli.checks.streams import streams_findings
from tenure.cli.config import load_config
from tenure.cli.exits import Exit
from tenure.cli.options import json_option
from tenure.cli.output import emit, emit_text, paint
from tenure.contracts.streams.options import Options
from tenure.core.registry import open_part, parse_url
from tenure.store.redis import Redis

_DOWN = ("reachable", "folder", "database file")
_MARKS = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "problem": ("PROBLEM", "red")}


@click.command("doctor", short_help="Look for what will hurt, and say what helps.")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@json_option
def command(queue_urls: tuple[str, ...], as_json: bool) -> int:
    """Check this machine, the queues and their stores; exit code 8 if there is a problem.

    \b
    tenure doctor
    tenure doctor 'inbox+postgresql://user@host/db' --json
    """
    config = load_config()
    urls = list(queue_urls) or config.queue_urls()
    findings = machine_findings(config)
    for url in urls:
        found = asyncio.run(_queue_findings(url))
        # Queues of one store: what was said of it once need not be said again.
        findings += [finding for finding in found if finding not in findings]
    for finding in findings:
        if as_json:
            emit(msgspec.to_builtins(finding))
        else:
            emit_text(_line(finding))
    return Exit.PROBLEMS if any(f.level == "problem" for f in findings) else Exit.OK


async def _queue_findings(url: str) -> list[Finding]:
    """The store first; the queue is asked only where its store is well enough to answer."""
    parsed = parse_url(url)
    kind = parsed.store.partition("://")[0]
    if kind.startswith("http"):
        return await asyncio.to_thread(remote_findings, parsed.store, parsed.safe)
    if kind.startswith("redis"):
        found = await _redis_findings(url)
    elif kind.startswith("postgres"):
        found = await postgres_findings(open_part(url, "database").database.url)
    elif kind in ("sqlite", "libsql"):
        found = sqlite_findings(parsed.store)
    else:
        found = []
    if any(f.level == "problem" and f.check in _DOWN for f in found):
        return found
    told = {finding.check for finding in found}
    return [*found, *(f for f in await ledger_findings(url) if f.check not in told)]


async def _redis_findings(url: str) -> list[Finding]:
    parsed = parse_url(url)
    shape = import_module(f"tenure.contracts.{parsed.contract}.options").Options
    options, store = parsed.read(shape)
    redis = Redis(store, name="tenure-doctor", connect_timeout_ms=2_000, timeout_ms=5_000)
    try:
        findings = await redis_findings(redis, parsed.safe)
        if findings[0].level == "ok" and parsed.contract == "streams":
            findings += await streams_findings(redis, cast("Options", options))
        return findings
    finally:
        await redis.close()


def _line(finding: Finding) -> str:
    mark, colour = _MARKS[finding.level]
    line = f"{paint(mark, colour)}  {finding.check:<17} {finding.detail}"
    if finding.remedy:
        line += f"\n{' ' * 27}{paint('-> ' + finding.remedy, 'bold', sys.stdout)}"
    return line
