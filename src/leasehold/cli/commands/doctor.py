"""`leasehold doctor`: look for what will hurt, and say what helps."""

from __future__ import annotations

import asyncio
import sys

import click
import msgspec

from leasehold.cli.checks.finding import Finding
from leasehold.cli.checks.machine import machine_findings
from leasehold.cli.checks.redis import redis_findings
from leasehold.cli.checks.streams import streams_findings
from leasehold.cli.config import load_config
from leasehold.cli.exits import Exit
from leasehold.cli.options import json_option
from leasehold.cli.output import emit, emit_text, paint
from leasehold.contracts.streams.options import Options
from leasehold.core.opening import parse_url
from leasehold.store.redis import Redis

_MARKS = {"ok": ("ok     ", "green"), "note": ("note   ", "yellow"), "problem": ("PROBLEM", "red")}


@click.command("doctor", short_help="Look for what will hurt, and say what helps.")
@click.argument("queue_urls", metavar="[URL]...", nargs=-1)
@json_option
def command(queue_urls: tuple[str, ...], as_json: bool) -> int:
    """Check this machine and the stores of its queues; exit code 8 if there is a problem."""
    config = load_config()
    urls = list(queue_urls) or config.texts("worker.queues") or [config.text("queue_url")]
    findings = machine_findings(config)
    for url in urls:
        findings += asyncio.run(_queue_findings(url))
    for finding in findings:
        if as_json:
            emit(msgspec.to_builtins(finding))
        else:
            emit_text(_line(finding))
    return Exit.PROBLEMS if any(f.level == "problem" for f in findings) else Exit.OK


async def _queue_findings(url: str) -> list[Finding]:
    parsed = parse_url(url)
    if parsed.contract != "streams":
        detail = f"{parsed.safe}: nothing to look at for this contract yet"
        return [
            Finding("note", "queue", detail, "its own commands say if it answers: leasehold queues")
        ]
    options, store = parsed.read(Options)
    redis = Redis(store, name="leasehold-doctor", connect_timeout_ms=2_000, timeout_ms=5_000)
    try:
        findings = await redis_findings(redis, parsed.safe)
        if findings[0].level == "ok":
            findings += await streams_findings(redis, options)
        return findings
    finally:
        await redis.close()


def _line(finding: Finding) -> str:
    mark, colour = _MARKS[finding.level]
    line = f"{paint(mark, colour)}  {finding.check:<17} {finding.detail}"
    if finding.remedy:
        line += f"\n{' ' * 27}{paint('-> ' + finding.remedy, 'bold', sys.stdout)}"
    return line
