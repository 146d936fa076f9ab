"""`tenure gateway`: serve jobs over HTTP."""

from __future__ import annotations

import sys
from typing import Any

import click

from tenure.cli.config import Config, load_config, notify_address, read_secret_file
from tenure.cli.parent import end_with_parent
from tenure.core.errors import UsageError


@click.command("gateway", short_help="Serve jobs over HTTP.")
@click.option("--host", help="The address to listen on (127.0.0.1).")
@click.option("--port", type=click.IntRange(1, 65535), help="The port to listen on (8470).")
@click.option(
    "--admin-address", metavar="HOST:PORT", help="Answer admins and observers there only."
)
@click.option("--from", "queue_urls", metavar="URL", multiple=True, help="A queue to serve; again.")
@click.option("--redis", "redis_url", metavar="URL", help="Short for --from streams+URL.")
@click.option("--require-key", is_flag=True, help="Ask for an API key on loopback too.")
@click.option("--worker-key-file", help="A file with a key that is good for workers besides.")
@click.option(
    "--trusted-proxy",
    "trusted_proxies",
    metavar="ADDRESS",
    multiple=True,
    help="A proxy whose headers name the client and the person; again.",
)
@click.option(
    "--sso-group",
    "sso_groups",
    metavar="GROUP=SCOPES",
    multiple=True,
    help="What people of a group may do, such as ops=admin; again.",
)
@click.option("--log-level", help="debug, info, warning or error.")
@click.option("--parent", type=int, default=0, hidden=True)
def command(
    host: str | None,
    port: int | None,
    admin_address: str | None,
    queue_urls: tuple[str, ...],
    redis_url: str | None,
    require_key: bool,
    worker_key_file: str | None,
    trusted_proxies: tuple[str, ...],
    sso_groups: tuple[str, ...],
    log_level: str | None,
    parent: int,
) -> None:
    """Serve the HTTP API of the queues, with event streams, metrics and health.

    Without API keys only on loopback; make one with `tenure keys create`.

    \b
    tenure gateway --from streams+redis://127.0.0.1:6379/0
    tenure gateway --host 0.0.0.0 --from 'inbox+sqlite:///jobs.db' --from 'plane+sqlite:///jobs.db'
    """
    end_with_parent(parent)
    config = load_config()
    urls = [*queue_urls, *([f"streams+{redis_url}"] if redis_url else [])]
    try:
        from tenure.gateway.notify import Notifier
        from tenure.gateway.serve import run
        from tenure.gateway.settings import GatewaySettings
    except ModuleNotFoundError as error:
        raise UsageError(f"{error}; install the gateway: pip install 'tenure[gateway]'") from None
    from tenure.cli.logs import set_up_logs

    set_up_logs(config, log_level)
    queues = tuple(config.texts("gateway.queues", tuple(urls)) or [config.text("queue_url")])
    settings = GatewaySettings(
        queues=queues,
        host=config.text("gateway.host", host),
        port=config.integer("gateway.port", port),
        admin_address=config.text("gateway.admin_address", admin_address),
        anonymous=not require_key,
        worker_key=_first_line(worker_key_file) if worker_key_file else "",
        ttl_s=_ttl_s(config),
        lent=_lent(config) if any(url.startswith("inbox+") for url in queues) else {},
        redact=tuple(config.texts("gateway.redact")),
        audit_keep=config.integer("gateway.audit_keep"),
        trace_url=config.text("gateway.trace_url"),
        lake=config.text("gateway.lake"),
        trusted_proxies=tuple(config.texts("gateway.trusted_proxies", trusted_proxies)),
        sso_groups=tuple(config.texts("gateway.sso_groups", sso_groups)),
        sso_user_header=config.text("gateway.sso_user_header"),
        sso_groups_header=config.text("gateway.sso_groups_header"),
        **_limits(config),
    )
    address, watchdog_ms = notify_address()
    # A thread that reads a large body gives way to the event loop this soon.
    sys.setswitchinterval(0.001)
    run(settings, Notifier(address, watchdog_ms // 2))


def _ttl_s(config: Config) -> int:
    found = config.find("gateway.ttl_s")
    ttl_s = config.integer("gateway.ttl_s")
    if ttl_s < 1:
        raise UsageError(f"gateway.ttl_s ({found.origin}) is at least 1 second, not {ttl_s}")
    return ttl_s


def _limits(config: Config) -> dict[str, Any]:
    """How much callers may ask for, in the gateway's own units."""
    return {
        "streams_per_key": config.integer("gateway.streams_per_key"),
        "heartbeat_ms": round(config.number("gateway.heartbeat_s") * 1000),
        "depth_per_key": config.integer("gateway.depth_per_key"),
        "rate_per_s": config.number("gateway.rate_per_s"),
        "rate_burst": config.integer("gateway.rate_burst"),
        "body_bytes_max": config.integer("gateway.body_bytes_max"),
        "body_timeout_ms": round(config.number("gateway.body_timeout_s") * 1000),
        "form_bytes_max": config.integer("gateway.form_bytes_max"),
        "head_bytes_max": config.integer("gateway.head_bytes_max"),
        "head_timeout_ms": round(config.number("gateway.head_timeout_s") * 1000),
        "idle_timeout_s": config.integer("gateway.idle_timeout_s"),
        "connections_max": config.integer("gateway.connections_max"),
        "connections_per_address": config.integer("gateway.connections_per_address"),
        "session_ms": round(config.number("gateway.session_s") * 1000),
        "session_idle_ms": round(config.number("gateway.session_idle_s") * 1000),
        "failed_logins_per_min": config.integer("gateway.failed_logins_per_min"),
        "drain_ms": round(config.number("gateway.drain_timeout_s") * 1000),
    }


def _first_line(path: str) -> str:
    try:
        return read_secret_file(path).split("\n", 1)[0].strip()
    except OSError as error:
        raise UsageError(f"--worker-key-file {path}: {error.strerror}") from None


def _lent(config: Config) -> dict[str, Any]:
    """What an inbox seals credentials with, and who may be named in a job."""
    from tenure.cli.key_ring import open_seal
    from tenure.egress import Guard, Policy
    from tenure.webhooks.secrets import read_secrets

    guard = Guard(Policy(allow=tuple(config.texts("egress.allow"))))
    signed = read_secrets(config.text("webhooks.secrets"))
    return {
        "seal": open_seal(config),
        "check_url": guard.check_url,
        "has_secret": signed.has,
        "files": bool(config.text("transcode.files")),
    }
