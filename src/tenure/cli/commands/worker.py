"""`tenure worker`: run the tasks of a file or module against one queue or many."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

from tenure.cli.config import (
    Config,
    as_list,
    load_config,
    notify_address,
    process_environment,
)
from tenure.cli.parent import end_with_parent
from tenure.core.errors import UsageError


@click.command("worker", short_help="Run the tasks of a file or module.")
@click.argument("targets", metavar="APP.py|MODULE...", nargs=-1, required=True)
@click.option("--from", "queue_urls", metavar="URL", multiple=True, help="A queue to serve; again.")
@click.option("--concurrency", type=click.IntRange(min=1), help="Attempts at once.")
@click.option("--processes", type=click.IntRange(min=1), help="Worker processes (1).")
@click.option("--burst", is_flag=True, help="Stop when the queues are empty.")
@click.option("--drain-timeout", "drain_timeout_s", type=click.FloatRange(min=0), help="Seconds.")
@click.option("--metrics-port", type=click.IntRange(1, 65535), help="For Prometheus, on loopback.")
@click.option("--lease-ms", type=click.IntRange(min=1), help="How long a lease lasts.")
@click.option("--log-level", help="debug, info, warning or error.")
@click.option("--samples", is_flag=True, help="With tenure.tasks: samples where there is no model.")
@click.option("--parent", type=int, default=0, hidden=True)
@click.option("--only-load", is_flag=True, hidden=True)
def command(
    targets: tuple[str, ...], queue_urls: tuple[str, ...], parent: int, **flags: Any
) -> int:
    """Run the @task functions of files (app.py) or modules.

    `tenure.tasks` are the built-in ones, `tenure.transcode` those of an inbox.

    The first SIGTERM or Ctrl-C lets running jobs finish, the second hands them back at once.

    \b
    tenure worker app.py
    tenure worker app.py --from 'bullmq+redis://127.0.0.1:6379/0?queue=mail' --concurrency 50
    tenure worker app.py --burst
    """
    end_with_parent(parent)
    config = load_config()
    if flags["only_load"]:
        from tenure.cli.loading import load_all

        load_all(targets, config)
        return 0
    urls = config.texts("worker.queues", queue_urls) or [config.text("queue_url")]
    lease_ms = config.integer("worker.lease_ms", flags["lease_ms"])
    urls = [with_lease(url, lease_ms) for url in urls]
    if config.integer("worker.processes", flags["processes"]) > 1:
        return _many(targets, urls, config, flags)
    return _one(targets, urls, config, flags)


def with_lease(url: str, lease_ms: int) -> str:
    """The queue URL with another lease time.

    >>> with_lease("streams+redis://h/0?ttl_s=60", 5000), with_lease("memory://a", 0)
    ('streams+redis://h/0?ttl_s=60&lease_ms=5000', 'memory://a')
    """
    if not lease_ms:
        return url
    return f"{url}{'&' if '?' in url else '?'}lease_ms={lease_ms}"


def _one(targets: Sequence[str], urls: list[str], config: Config, flags: dict[str, Any]) -> int:
    from tenure.cli.loading import INBOX, SLOTS, load_all, usual, with_share, with_slots
    from tenure.cli.logs import set_up_logs
    from tenure.worker import Settings, Worker, identity
    from tenure.worker.telemetry import add_job

    level = set_up_logs(config, flags["log_level"], add=[add_job])
    concurrency = config.integer("worker.concurrency", flags["concurrency"])
    tasks = load_all(targets, config, samples=flags["samples"], urls=urls, concurrency=concurrency)
    if targets[0] == INBOX:
        per_key, slots = config.integer("transcode.per_key"), concurrency or SLOTS["inbox"]
        urls = [with_share(url, slots, per_key) for url in urls]
        urls = urls if concurrency else [with_slots(url) for url in urls]
    socket, watchdog_ms = notify_address()
    worker_id = identity(process_environment())
    otlp_url = config.text("worker.otlp_url")
    if otlp_url:
        from tenure.cli.tracing import set_up_traces

        set_up_traces(otlp_url, worker_id)
    settings = Settings(
        worker_id=worker_id,
        tracing=bool(otlp_url),
        concurrency=concurrency or usual(targets[0]),
        drain_ms=round(config.number("worker.drain_timeout_s", flags["drain_timeout_s"]) * 1000),
        unknown_task_ms=round(config.number("worker.unknown_task_s") * 1000),
        burst=flags["burst"],
        debug=level == "debug",
        notify_socket=socket,
        watchdog_ms=watchdog_ms,
    )
    worker = Worker(tasks, queues=urls, settings=settings)
    port = config.integer("worker.metrics_port", flags["metrics_port"])
    if port:
        _serve_metrics(port, worker.registry)
    return worker.run()


def _serve_metrics(port: int, registry: Any) -> None:
    from prometheus_client import start_http_server

    try:
        start_http_server(port, addr="127.0.0.1", registry=registry)
    except OSError as error:
        raise UsageError(
            f"--metrics-port {port} cannot be used ({error.strerror}); choose a free one"
        ) from None


def _many(targets: Sequence[str], urls: list[str], config: Config, flags: dict[str, Any]) -> int:
    from tenure.cli.herd import run_herd

    count = config.integer("worker.processes", flags["processes"])
    drain_s = config.number("worker.drain_timeout_s", flags["drain_timeout_s"])
    port = config.integer("worker.metrics_port", flags["metrics_port"])
    base = [sys.executable, "-P", "-m", "tenure.cli", "worker", *targets, "--processes", "1"]
    for name in ("concurrency", "log_level"):
        if flags[name] is not None:
            base += [f"--{name.replace('_', '-')}", str(flags[name])]
    base += ["--drain-timeout", str(drain_s)]
    base += ["--burst"] * flags["burst"] + ["--samples"] * flags["samples"]
    herd = [base + (["--metrics-port", str(port + n)] if port else []) for n in range(count)]
    seen = {"TENURE_WORKER_QUEUES": as_list(urls)}
    return run_herd(herd, seen, drain_s=drain_s, once=flags["burst"])
