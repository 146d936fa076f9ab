"""Logs hold no local variables: neither ours nor those of the standard library, in any format."""

from __future__ import annotations

import subprocess
import sys

import pytest

CANARY = "c4n4ry"
FAILS = f"""
import logging, os, sys, structlog
import rich
def deep(n, secret="{CANARY}"):
    if n:
        return deep(n - 1)
    raise ValueError("m" * 100_000)
def fail():
    password = "".join(["c4n", "4ry"])
    try:
        deep(900)
    except ValueError as error:
        raise RuntimeError("what went wrong") from error
def tell():
    try:
        fail()
    except RuntimeError:
        structlog.get_logger().exception("by structlog")
        structlog.get_logger().error("as a value", exc_info=sys.exc_info()[1])
        logging.getLogger("uvicorn.error").exception("by logging")
    structlog.get_logger().error("without one", exc_info=True)
"""
CLI = """
from tenure.cli.config import load_config
from tenure.cli.serve import set_up_logs
set_up_logs(load_config())
tell()
"""
WORKER = """
from tenure.worker.telemetry import configure_logs
configure_logs(json=os.environ["TENURE_LOG_FORMAT"] == "json")
tell()
"""
SERVING = """
import asyncio
from tenure import Worker, task
from tenure.worker import Settings
worker = Worker([task("a")(lambda job: None)], queues=["memory://"], settings=Settings(burst=True))
asyncio.run(worker.serve())
tell()
"""
LOOKING = """
import asyncio
from tenure.cli.monitor import open_queues
async def look():
    async with open_queues(["memory://"]):
        tell()
asyncio.run(look())
"""
GATEWAY = """
from tenure.gateway.application import Gateway
from tenure.gateway.settings import GatewaySettings
Gateway(GatewaySettings(queues=("memory://",)))
tell()
"""

SET_UPS = [CLI, WORKER, SERVING, LOOKING, GATEWAY]


@pytest.mark.parametrize("style", ["text", "json"])
@pytest.mark.parametrize("set_up", SET_UPS, ids=["cli", "worker", "serving", "looking", "gateway"])
def test_a_traceback_in_the_log_is_plain_and_short(set_up: str, style: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS + set_up],
        capture_output=True,
        text=True,
        check=True,
        env={"TENURE_LOG_FORMAT": style},
    )
    told = done.stdout + done.stderr
    assert told.count("what went wrong") >= 2
    assert "in fail" in told
    assert CANARY not in told.replace(f'"{CANARY}"', "")  # a line of source may be shown
    assert "by logging" in told
    assert len(told) < 4 * 10_000
    assert "\u2502" not in told
    assert "locals" not in told
