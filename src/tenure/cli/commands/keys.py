"""`tenure keys`: create, list and revoke the API keys of a queue's gateways.

The keys of the vault are `rotate` and `new-kek`, in `cli/rotating.py`.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import click
import msgspec

from tenure.cli.config import load_config
from tenure.cli.options import json_option, queue_option
from tenure.cli.output import ago, emit, emit_text, note, table
from tenure.cli.rotating import new_kek, rotate
from tenure.core.endpoint import SCOPES, Scope
from tenure.core.errors import NotFound, StoreError, UsageError

Answer = TypeVar("Answer")


_QUOTA = (
    ("rate", click.FloatRange, "Requests a second"),
    ("burst", click.IntRange, "Requests at once"),
    ("depth", click.IntRange, "Unfinished jobs in a queue"),
    ("body", click.IntRange, "Bytes of a request body"),
    ("streams", click.IntRange, "Event streams open at once"),
    ("transcodes", click.IntRange, "Transcodes at once, of all workers"),
)
_SHOWN = 12  # so much of a session's hash tells it from the others
_PRODUCER: tuple[Scope, ...] = ("jobs:write", "jobs:read", "jobs:cancel")


@click.group("keys", short_help="Create, list and revoke API keys.")
def command() -> None:
    """Create, list and revoke API keys. They live in the queue's store, as hashes.

    `new-kek` and `rotate` are for the keys that seal stored credentials.

    \b
    tenure keys create "on call" --scope observe
    tenure keys limit KEY_ID --rate 50 --depth 1000
    tenure keys ls --json
    tenure keys revoke KEY_ID
    """


command.add_command(rotate)
command.add_command(new_kek)


def _quota_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, kind, text in reversed(_QUOTA):
        least, more = (1, "") if name == "body" else (0, "; 0: no limit")
        option = click.option(f"--{name}", type=kind(min=least), help=f"{text}{more}.")
        function = option(function)
    return function


@command.command("create")
@click.argument("name", default="")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help=f"{', '.join(SCOPES)}, or stream:NAME for streams of a plane. May be repeated.",
)
@click.option(
    "--days", type=click.FloatRange(0, 36_500, min_open=True), help="How long it is good."
)
@_quota_options
@queue_option
@json_option
def create(
    name: str,
    scopes: tuple[str, ...],
    days: float | None,
    queue_url: str | None,
    as_json: bool,
    **numbers: float | None,
) -> None:
    """Make a key and show it, this once; without --scope it may submit, read and cancel jobs."""
    chosen, quota = scopes or _PRODUCER, _quota(numbers)
    ttl_ms = None if days is None else round(days * 86_400_000)

    async def make(ring: Any) -> Any:
        made = await ring.create(chosen, name, ttl_ms)
        if msgspec.to_builtins(quota):
            await ring.limit(made[0].id, quota)
        return made

    key, text = _with_ring(
        queue_url, make, lambda made: ("create key", made[0].id, " ".join(made[0].scopes))
    )
    if as_json:
        emit({"id": key.id, "key": text, "scopes": list(key.scopes), "expires_ms": key.expires_ms})
    else:
        emit_text(text)
        note(f"key {key.id} may do {', '.join(key.scopes)}; it cannot be shown again")


@command.command("limit")
@click.argument("key_id", metavar="ID")
@_quota_options
@queue_option
@json_option
def limit(key_id: str, queue_url: str | None, as_json: bool, **numbers: float | None) -> None:
    """Give a key numbers of its own for what it may ask for; those left out are as for every key.

    The settings gateway.rate_per_s, gateway.depth_per_key, ... are for keys without numbers.
    """
    quota = _quota(numbers)
    said = _limits(msgspec.to_builtins(quota)) or "is as every key"
    done = ("limit key", key_id, said)
    if not _with_ring(queue_url, lambda ring: ring.limit(key_id, quota), lambda _: done):
        raise NotFound(f"there is no key {key_id!r}; `tenure keys ls` lists those there are")
    if as_json:
        emit({"id": key_id, "quota": quota})
    else:
        emit_text(f"{key_id} {said}")


@command.command("ls")
@queue_option
@json_option
def ls(queue_url: str | None, as_json: bool) -> None:
    """List keys; the keys themselves are not kept."""
    keys = _with_ring(queue_url, lambda ring: ring.list())
    views = [{k: v for k, v in msgspec.to_builtins(key).items() if k != "secret_h"} for key in keys]
    if as_json:
        for view in views:
            emit(view)
    elif views:
        emit_text(
            table(
                ["ID", "NAME", "SCOPES", "CREATED", "LAST USED", "EXPIRES", "LIMITS"],
                map(_row, views),
            )
        )
    else:
        note("no keys: gateways on loopback are open, others do not start")


@command.command("revoke")
@click.argument("key_id", metavar="ID")
@queue_option
@json_option
def revoke(key_id: str, queue_url: str | None, as_json: bool) -> None:
    """Take a key away; gateways obey within seconds."""
    done = ("revoke key", key_id, "ok")
    if not _with_ring(queue_url, lambda ring: ring.revoke(key_id), lambda _: done):
        raise NotFound(f"there is no key {key_id!r}; `tenure keys ls` lists those there are")
    if as_json:
        emit({"id": key_id, "revoked": True})
    else:
        emit_text(f"{key_id} revoked")


@command.command("sessions")
@queue_option
@json_option
def sessions(queue_url: str | None, as_json: bool) -> None:
    """List the sessions that are signed in to the pages, and their keys."""
    views = [
        msgspec.to_builtins(each) for each in _with_ring(queue_url, lambda ring: ring.sessions())
    ]
    if as_json:
        for view in views:
            emit(view)
    elif views:
        rows = (
            [
                view["session_h"][:_SHOWN],
                view["key_id"],
                ago(view["created_ms"]),
                ago(view["seen_ms"]),
            ]
            for view in views
        )
        emit_text(table(["SESSION", "KEY", "SIGNED IN", "LAST USED"], rows))
    else:
        note("no sessions: no browser is signed in")


@command.command("sign-out")
@click.argument("session", metavar="SESSION", default="")
@click.option("--key", "key_id", metavar="ID", default="", help="All sessions of this key.")
@queue_option
@json_option
def sign_out(session: str, key_id: str, queue_url: str | None, as_json: bool) -> None:
    """End a session that `keys sessions` lists, or all of a key."""
    if bool(session) == bool(key_id):
        raise UsageError("name one session, or --key ID for all of a key")

    async def end(ring: Any) -> int:
        meant = [
            each.session_h
            for each in await ring.sessions()
            if each.key_id == key_id or (session and each.session_h.startswith(session))
        ]
        if session and len(meant) > 1:
            raise UsageError(f"{len(meant)} sessions begin with {session!r}; write more of it")
        return sum([await ring.end_sessions(session_h=each) for each in meant])

    ended = _with_ring(
        queue_url, end, lambda count: ("sign out", key_id, f"{count} {session[:_SHOWN]}".strip())
    )
    if not ended:
        raise NotFound("there is no such session; `tenure keys sessions` lists those there are")
    if as_json:
        emit({"ended": ended})
    else:
        emit_text(f"{ended} signed out")


def _row(view: dict[str, Any]) -> list[str]:
    return [
        view["id"],
        view["name"],
        " ".join(view["scopes"]),
        ago(view["created_ms"]),
        ago(view.get("last_used_ms", 0)),
        _day(view.get("expires_ms", 0)),
        _limits(view.get("quota", {})),
    ]


def _quota(numbers: dict[str, Any]) -> Any:
    from tenure.gateway.limits import Quota

    names = {"rate": "rate_per_s", "burst": "rate_burst", "body": "body_bytes"}
    return Quota(**{names.get(name, name): number for name, number in numbers.items()})


def _limits(quota: dict[str, Any]) -> str:
    return ", ".join(f"{name} {number:g}" for name, number in quota.items())


def _day(ts_ms: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%Y-%m-%d") if ts_ms else "never"


def _with_ring(
    queue_url: str | None,
    ask: Callable[[Any], Awaitable[Answer]],
    did: Callable[[Answer], tuple[str, str, str]] | None = None,
) -> Answer:
    """The ring's answer. What changed it, `did` says for the audit log: action, key and outcome."""
    from tenure.gateway.keyrings import open_keyring
    from tenure.gateway.keys import MemoryKeyRing

    async def asked() -> Answer:
        url = load_config().text("queue_url", queue_url)
        ring = open_keyring(url)
        if isinstance(ring, MemoryKeyRing):
            raise UsageError("the keys of this queue live in its process and cannot be reached")
        try:
            answer = await ask(ring)
        finally:
            await ring.close()
        if did is not None and answer:
            await _write_down(url, *did(answer))
        return answer

    return asyncio.run(asked())


async def _write_down(url: str, action: str, key_id: str, outcome: str) -> None:
    """An entry in the audit log beside the ring; the change itself has been made."""
    from tenure.dashboard.audit import Entry, open_audit
    from tenure.gateway.keyrings import open_side_store

    side = open_side_store(url, "tenure-audit")
    log = open_audit(url, side, keep=load_config().integer("gateway.audit_keep"))
    entry = Entry(
        ts_ms=time.time_ns() // 1_000_000,
        who=f"cli:{_unix_user()}",
        action=action,
        whose=(key_id,) if key_id else (),
        outcome=outcome,
    )
    try:
        await log.add(entry)
    except StoreError as error:
        note(f"the audit log has no entry of it: {error}")
    finally:
        await log.close()
        if side is not None:
            await side[0].close()


def _unix_user() -> str:
    """The account of this process; a variable of the environment could name another."""
    if sys.platform == "win32":
        return getpass.getuser()
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run under ids without a name
        return str(os.getuid())
