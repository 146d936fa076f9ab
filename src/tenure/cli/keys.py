"""The commands for API keys, for the keys that encrypt credentials, and for the audit log."""

from __future__ import annotations

import asyncio
import getpass
import importlib
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast

import click
import msgspec

from tenure.cli.config import Config, load_config
from tenure.cli.console import (
    Exit,
    ago,
    answer,
    answer_rows,
    emit,
    emit_text,
    json_option,
    note,
    queue_option,
)
from tenure.core.endpoint import SCOPES, Scope
from tenure.core.errors import NotFound, StoreError, UsageError

if TYPE_CHECKING:
    from tenure.dashboard.audit import Link
    from tenure.vault import KekRing, Rotation, Vault

Answer = TypeVar("Answer")


def open_ring(config: Config) -> KekRing:
    """The key ring: of the function `vault.kms` if it is set, else of `vault.keys`."""
    hook, keys = config.text("vault.kms"), config.text("vault.keys")
    if hook:
        return _ring_of(hook)
    if not keys:
        raise UsageError(
            "there is no key ring: set TENURE_VAULT_KEYS_FILE to a file with a line of "
            "`tenure keys new-kek`, or vault.kms to a function that makes one"
        )
    from tenure.vault import read_ring

    return read_ring(keys)


Seal = Callable[[bytes, str, str, int], Awaitable[Mapping[str, Any]]]
"""Encrypts credentials for a job, requester and version; returns the job's four columns."""


def open_seal(config: Config) -> Seal | None:
    """The function with which a gateway encrypts credentials; None without a key ring."""
    if not config.is_set("vault.kms") and not config.is_set("vault.keys"):
        return None
    from tenure.vault import Binding, Secret, Vault

    vault = Vault(open_ring(config))

    async def seal(plain: bytes, job_id: str, requester: str, version: int) -> Mapping[str, Any]:
        sealed = await vault.seal(Secret(plain), Binding(job_id, requester, version))
        return {
            "storage_creds_encrypted": sealed.encrypted,
            "storage_creds_dek_wrapped": sealed.dek_wrapped,
            "storage_creds_kek_id": sealed.kek_id,
            "storage_creds_encryption_version": sealed.encryption_version,
        }

    return seal


def _ring_of(hook: str) -> KekRing:
    name, _, function = hook.partition(":")
    try:
        ring = getattr(importlib.import_module(name), function)()
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"vault.kms is {hook!r}, and it cannot be used: {error}") from None
    missing = [each for each in ("active_id", "wrap", "unwrap") if not hasattr(ring, each)]
    if missing:
        raise UsageError(f"what {hook} returned is no key ring: it lacks {', '.join(missing)}")
    return cast("KekRing", ring)


@click.command("new-kek")
@click.argument("kek_id", metavar="[ID]", default="")
def new_kek(kek_id: str) -> None:
    """Make a key for the ring and print its line; put it first in the file of the ring.

    Without an id it is named for today.
    """
    from tenure.vault import new_kek as make

    emit_text(make(kek_id or f"kek-{datetime.now(UTC):%Y-%m-%d}"))


@click.command("rotate")
@click.option("--batch", type=click.IntRange(1, 10_000), default=500, help="Rows a step (500).")
@queue_option
@json_option
def rotate(batch: int, queue_url: str | None, as_json: bool) -> int:
    """Re-wrap the keys of all stored credentials with the ring's first key, while workers run.

    The encrypted data stay as they are. The command may be stopped and run again at any time. Give
    every gateway and worker the new ring first; remove an old key when no row needs it.
    """
    active, done = asyncio.run(_rotate(queue_url, batch))
    if as_json:
        left, unopened = dict(done.left), list(done.unopened)
        counts = {"active": active, "rewrapped": done.rewrapped}
        emit({**counts, "left": left, "unopened": unopened})
    else:
        emit_text(f"{done.rewrapped} rewrapped under {active}")
        for kek_id, count in sorted(done.left.items()):
            if kek_id != active:
                note(f"{count} rows are still under {kek_id}: keep that key")
        if set(done.left) <= {active}:
            note("no row needs any other key: older ones may leave the ring")
    for job_id in done.unopened[:20]:
        note(f"tenure: job {job_id}: its key does not open, is the ring complete?")
    return int(Exit.PROBLEMS if done.unopened else Exit.OK)


async def _rotate(queue_url: str | None, batch: int) -> tuple[str, Rotation]:
    from tenure.core.registry import open_part
    from tenure.vault import Vault
    from tenure.vault import rotate as rewrap

    config = load_config()
    vault = Vault(open_ring(config))
    url = config.text("queue_url", queue_url)
    rows = open_part(url, "credentials")
    try:
        await _seal_plain(url, vault)
        return vault.active_kek_id, await rewrap(rows, vault, batch=batch)
    finally:
        await rows.close()


async def _seal_plain(url: str, vault: Vault) -> None:
    """Seal the webhook secrets that an older version stored as plain text."""
    from tenure.core.registry import open_part

    try:
        secrets = open_part(url, "endpoint_secrets", vault=vault)
    except UsageError:  # a contract without webhooks
        return
    try:
        if sealed := await secrets.seal_plain():
            note(f"{sealed} webhook secrets that lay open are sealed")
    finally:
        await secrets.close()


_QUOTA = (
    ("rate", click.FloatRange, "Requests a second"),
    ("burst", click.IntRange, "Requests at once"),
    ("depth", click.IntRange, "Unfinished jobs in a queue"),
    ("body", click.IntRange, "Bytes of a request body"),
    ("streams", click.IntRange, "Event streams open at once"),
    ("transcodes", click.IntRange, "Transcodes at once, of all workers"),
)
_HASH_CHARS_SHOWN = 12  # enough to distinguish sessions
_PRODUCER: tuple[Scope, ...] = ("jobs:write", "jobs:read", "jobs:cancel")


@click.group("keys")
def keys_command() -> None:
    """Create, list and revoke API keys. They live in the queue's store, as hashes.

    `new-kek` and `rotate` are for the keys that seal stored credentials.

    \b
    tenure keys create "on call" --scope observe
    tenure keys limit KEY_ID --rate 50 --depth 1000
    tenure keys ls --json
    tenure keys revoke KEY_ID
    """


keys_command.add_command(rotate)
keys_command.add_command(new_kek)


def _quota_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for name, kind, text in reversed(_QUOTA):
        least, more = (1, "") if name == "body" else (0, "; 0: no limit")
        option = click.option(f"--{name}", type=kind(min=least), help=f"{text}{more}.")
        function = option(function)
    return function


@keys_command.command("create")
@click.argument("name", default="")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    metavar="SCOPE",
    help=f"{', '.join(SCOPES)}, or stream:NAME for streams of a plane. May be repeated.",
)
@click.option(
    "--days", type=click.FloatRange(0, 36_500, min_open=True), help="Days until it expires."
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
        created = await ring.create(chosen, name, ttl_ms)
        if msgspec.to_builtins(quota):
            await ring.limit(created[0].id, quota)
        return created

    key, text = _with_ring(
        queue_url, make, lambda new: ("create key", new[0].id, " ".join(new[0].scopes))
    )
    if as_json:
        emit({"id": key.id, "key": text, "scopes": list(key.scopes), "expires_ms": key.expires_ms})
    else:
        emit_text(text)
        note(f"key {key.id} may do {', '.join(key.scopes)}; it cannot be shown again")


@keys_command.command("limit")
@click.argument("key_id", metavar="ID")
@_quota_options
@queue_option
@json_option
def limit(key_id: str, queue_url: str | None, as_json: bool, **numbers: float | None) -> None:
    """Set the limits of a key; those left out are as for every key.

    The settings gateway.rate_per_s, gateway.depth_per_key, ... are for keys without limits.
    """
    quota = _quota(numbers)
    text = _limits(msgspec.to_builtins(quota)) or "is as every key"
    done = ("limit key", key_id, text)
    if not _with_ring(queue_url, lambda ring: ring.limit(key_id, quota), lambda _: done):
        raise NotFound(f"there is no key {key_id!r}; `tenure keys ls` lists those there are")
    answer(as_json, {"id": key_id, "quota": quota}, f"{key_id} {text}")


@keys_command.command("ls")
@queue_option
@json_option
def ls(queue_url: str | None, as_json: bool) -> None:
    """List keys; the keys themselves are not kept."""
    keys = _with_ring(queue_url, lambda ring: ring.list())
    views = [{k: v for k, v in msgspec.to_builtins(key).items() if k != "secret_h"} for key in keys]
    headers = ["ID", "NAME", "SCOPES", "CREATED", "LAST USED", "EXPIRES", "LIMITS"]
    none = "no keys: gateways on loopback are open, others do not start"
    answer_rows(as_json, views, headers, _key_row, none)


@keys_command.command("revoke")
@click.argument("key_id", metavar="ID")
@queue_option
@json_option
def revoke(key_id: str, queue_url: str | None, as_json: bool) -> None:
    """Revoke a key; gateways notice within seconds."""
    done = ("revoke key", key_id, "ok")
    if not _with_ring(queue_url, lambda ring: ring.revoke(key_id), lambda _: done):
        raise NotFound(f"there is no key {key_id!r}; `tenure keys ls` lists those there are")
    answer(as_json, {"id": key_id, "revoked": True}, f"{key_id} revoked")


@keys_command.command("sessions")
@queue_option
@json_option
def sessions(queue_url: str | None, as_json: bool) -> None:
    """List the sessions that are signed in to the pages, and their keys."""
    found = _with_ring(queue_url, lambda ring: ring.sessions())
    headers = ["SESSION", "KEY", "SIGNED IN", "LAST USED"]
    answer_rows(as_json, found, headers, _session_row, "no sessions: no browser is signed in")


def _session_row(session: Any) -> list[str]:
    times = ago(session.created_ms), ago(session.seen_ms)
    return [session.session_h[:_HASH_CHARS_SHOWN], session.key_id, *times]


@keys_command.command("sign-out")
@click.argument("session", metavar="SESSION", default="")
@click.option("--key", "key_id", metavar="ID", default="", help="All sessions of this key.")
@queue_option
@json_option
def sign_out(session: str, key_id: str, queue_url: str | None, as_json: bool) -> None:
    """End a session that `keys sessions` lists, or all of a key."""
    if bool(session) == bool(key_id):
        raise UsageError("name one session, or --key ID for all of a key")

    async def end(ring: Any) -> int:
        chosen = [
            each.session_h
            for each in await ring.sessions()
            if each.key_id == key_id or (session and each.session_h.startswith(session))
        ]
        if session and len(chosen) > 1:
            raise UsageError(f"{len(chosen)} sessions begin with {session!r}; write more of it")
        return sum([await ring.end_sessions(session_h=each) for each in chosen])

    ended = _with_ring(
        queue_url,
        end,
        lambda count: ("sign out", key_id, f"{count} {session[:_HASH_CHARS_SHOWN]}".strip()),
    )
    if not ended:
        raise NotFound("there is no such session; `tenure keys sessions` lists those there are")
    answer(as_json, {"ended": ended}, f"{ended} signed out")


def _key_row(view: dict[str, Any]) -> list[str]:
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
    return datetime.fromtimestamp(ts_ms / 1000, UTC).strftime("%Y-%m-%d") if ts_ms else "never"


def _with_ring(
    queue_url: str | None,
    ask: Callable[[Any], Awaitable[Answer]],
    describe: Callable[[Answer], tuple[str, str, str]] | None = None,
) -> Answer:
    """Call `ask` with the key ring; `describe` gives action, key and outcome for the audit log."""
    from tenure.gateway.keyrings import open_keyring
    from tenure.gateway.keys import MemoryKeyRing

    async def run() -> Answer:
        url = load_config().text("queue_url", queue_url)
        ring = open_keyring(url)
        if isinstance(ring, MemoryKeyRing):
            raise UsageError("the keys of this queue live in its process and cannot be reached")
        try:
            found = await ask(ring)
        finally:
            await ring.close()
        if describe is not None and found:
            await _log(url, *describe(found))
        return found

    return asyncio.run(run())


async def _log(url: str, action: str, key_id: str, outcome: str) -> None:
    """Add an entry to the audit log; the change itself has been made."""
    from tenure.dashboard.audit import AuditEntry

    entry = AuditEntry(
        ts_ms=time.time_ns() // 1_000_000,
        who=f"cli:{_unix_user()}",
        action=action,
        whose=(key_id,) if key_id else (),
        outcome=outcome,
    )
    async with _audit_log(url) as log:
        try:
            await log.add(entry)
        except StoreError as error:
            note(f"the audit log has no entry of it: {error}")


@asynccontextmanager
async def _audit_log(url: str) -> AsyncIterator[Any]:
    from tenure.dashboard.audit import open_audit
    from tenure.gateway.keyrings import open_side_store

    side = open_side_store(url, "tenure-audit")
    log = open_audit(url, side, keep=load_config().integer("gateway.audit_keep"))
    try:
        yield log
    finally:
        await log.close()
        if side is not None:
            await side[0].close()


def _unix_user() -> str:
    """The account of this process; an environment variable could name another one."""
    if sys.platform == "win32":
        return getpass.getuser()
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # containers run under ids without a name
        return str(os.getuid())


_number = click.IntRange(min=1)
_moment = click.DateTime(["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"])


@click.group("audit")
def audit_command() -> None:
    """Verify and export the log of who did what through gateways.

    It is in the store of a gateway's first queue. Keep its head somewhere else: with it, `verify`
    also finds that the end of the log was removed.

    \b
    tenure audit verify --head HASH
    tenure audit export --since 2026-01-01 -o audit.jsonl
    tenure audit verify --file audit.jsonl
    """


@audit_command.command("verify")
@click.option("--head", "head", default="", metavar="HASH", help="A head that was kept.")
@click.option("--file", "file", type=click.File("rb"), help="Check an export, or a part of one.")
@queue_option
@json_option
def verify(head: str, file: BinaryIO | None, queue_url: str | None, as_json: bool) -> int:
    """Name the first entry that was altered, removed or inserted, and show the head.

    Exit code 8 tells that there is one.
    """
    from tenure.dashboard.audit import read_export
    from tenure.dashboard.audit import verify as verify_links

    try:
        links = read_export(file) if file else _links(queue_url)
    except msgspec.DecodeError as error:
        raise UsageError(f"--file: a line is not one of an export: {error}") from None
    keep = load_config().integer("gateway.audit_keep")
    found = verify_links(links, head=head.strip().lower(), whole=file is None, keep=keep)
    if as_json:
        emit({"ok": not found.problem, **msgspec.to_builtins(found)})
    elif found.problem:
        note(f"tenure: {found.problem}")
    else:
        emit_text(f"{found.entries} entries are as they were written, {found.first} to {found.seq}")
        emit_text(f"head {found.head or 'none'}")
    if found.unchained and not as_json:
        note(f"the {found.unchained} oldest entries are from before there was a chain")
    return Exit.PROBLEMS if found.problem else Exit.OK


@audit_command.command("export")
@click.option("--first", type=_number, default=1, help="The number of the first entry.")
@click.option("--last", type=_number, help="The number of the last entry.")
@click.option("--since", type=_moment, help="Entries from this time on, in UTC.")
@click.option("--until", type=_moment, help="Entries before this time, in UTC.")
@click.option("--output", "-o", type=click.File("wb", atomic=True), default="-", help="A file.")
@queue_option
def export(
    first: int,
    last: int | None,
    since: datetime | None,
    until: datetime | None,
    output: BinaryIO,
    queue_url: str | None,
) -> None:
    """Write the log as JSON lines, oldest first: `seq`, `prev`, `hash` and `entry`."""
    chosen = [
        link
        for link in _links(queue_url)
        if link.seq >= first
        and (last is None or link.seq <= last)
        and (since is None or link.read().ts_ms >= _ms(since))
        and (until is None or link.read().ts_ms < _ms(until))
    ]
    output.writelines(link.line for link in chosen)
    note(f"{len(chosen)} entries")


def _ms(moment: datetime) -> int:
    return int(moment.replace(tzinfo=UTC).timestamp() * 1000)


def _links(queue_url: str | None) -> list[Link]:
    from tenure.dashboard.audit import MemoryAudit

    async def read() -> list[Link]:
        async with _audit_log(load_config().text("queue_url", queue_url)) as log:
            if isinstance(log, MemoryAudit):
                where = "the audit log of this queue lives in its process"
                raise UsageError(f"{where}; ask its gateway")
            return [link async for link in log.links()]

    return asyncio.run(read())
