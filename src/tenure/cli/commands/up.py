"""`tenure up`: everything on one machine with one command.

A Redis of our own (unless one is named), a gateway and a worker as child processes, so that each
can be killed without harm, and sample jobs that show the whole at work, with a receiver for their
webhooks. Ctrl-C stops them from the top down: samples, worker (which finishes what it runs),
gateway, receiver, store.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from tenure.cli.asking import StoreSide
from tenure.cli.config import (
    Config,
    as_list,
    browser_possible,
    child_environment,
    load_config,
)
from tenure.cli.exits import Exit, Failed
from tenure.cli.migrating import migrated
from tenure.cli.output import emit_text, note, paint
from tenure.cli.ready import until_ready
from tenure.cli.running import RunningUp, announce_up, running_up, withdraw_up
from tenure.cli.samples import Place, SampleFlow, Stores, usable_flows
from tenure.cli.samples.receiving import Surroundings, surroundings
from tenure.cli.stopping import stopping_on_signals
from tenure.cli.supervise import Supervisor
from tenure.cli.task_settings import task_settings
from tenure.cli.welcome import how_to_call, welcome
from tenure.core.errors import StoreError, UsageError
from tenure.core.registry import QueueUrl, parse_url
from tenure.store.embedded import EmbeddedRedis
from tenure.store.private import private_folder, write_private
from tenure.store.sqlite import file_of

_GATEWAY_ENDS_WITHIN_S = 15.0
_RECEIVER_ENDS_WITHIN_S = 5.0
_STORE_LOOK_EVERY_S = 0.5
# -P: modules in the current folder, where other users may write, are not imported.
_PROGRAM = (sys.executable, "-P", "-m", "tenure.cli")
WORKER_KEY = "worker.key"


@dataclass(frozen=True, slots=True)
class Wish:
    """What the flags and settings ask for."""

    host: str
    port: int
    data: Path
    redis_url: str
    samples: bool
    node: bool
    browser: bool
    drain_timeout_s: float
    postgres_url: str = ""
    targets: tuple[str, ...] = ()
    admin_address: str = ""

    @property
    def gateway_url(self) -> str:
        """Where this machine reaches the gateway."""
        return _url(self.host, self.port)

    @property
    def admin_url(self) -> str:
        """Where this machine reaches the pages and the metrics."""
        if not self.admin_address:
            return self.gateway_url
        from tenure.gateway.settings import split_address

        return _url(*split_address(self.admin_address))


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # nosec B104 # not to bind to
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{port}"


@click.command("up", short_help="Start everything: a store, a gateway, a worker with samples.")
@click.argument("targets", metavar="[APP.py|MODULE]...", nargs=-1)
@click.option("--port", type=click.IntRange(1, 65535), help="The gateway's port (8470).")
@click.option("--host", help="The gateway's address (127.0.0.1).")
@click.option(
    "--admin-address", metavar="HOST:PORT", help="Answer admins and observers there only."
)
@click.option("--data", type=click.Path(path_type=Path), help="The data folder (.tenure).")
@click.option("--redis", "redis_url", metavar="URL", help="Use this Redis; start none.")
@click.option(
    "--postgres", "postgres_url", metavar="URL", help="Keep inbox and plane there, not in SQLite."
)
@click.option("--no-browser", is_flag=True, help="Do not open a page.")
@click.option("--no-samples", is_flag=True, help="Submit no sample jobs, receive no webhooks.")
@click.option("--no-node", is_flag=True, help="Bring and run no Node.js program for the samples.")
def command(
    targets: tuple[str, ...],
    port: int | None,
    host: str | None,
    admin_address: str | None,
    data: Path | None,
    redis_url: str | None,
    postgres_url: str | None,
    no_browser: bool,
    no_samples: bool,
    no_node: bool,
) -> int:
    """Start a store, a gateway and a worker with samples; Ctrl-C stops them in good order.

    With files or modules of your own, the worker runs their @task functions too.

    \b
    tenure up
    tenure up app.py
    tenure up --port 9000 --data /var/lib/tenure --no-samples
    """
    config = load_config()
    wish = Wish(
        host=config.text("gateway.host", host),
        port=config.integer("gateway.port", port),
        targets=targets,
        admin_address=config.text("gateway.admin_address", admin_address),
        data=(data or config.data).expanduser().absolute(),
        redis_url=config.text("redis_url", redis_url),
        postgres_url=config.text("postgres_url", postgres_url).partition("?")[0],
        samples=not no_samples,
        node=not no_node,
        browser=not no_browser and browser_possible(),
        drain_timeout_s=config.number("worker.drain_timeout_s"),
    )
    _check_tasks(wish.targets)
    _check_free(wish)
    return asyncio.run(_up(wish, config))


def _check_tasks(targets: Sequence[str]) -> None:
    """A file that cannot be loaded is told of here, and not by a worker that ends again and again.

    In a process of its own: what a handler's module does when it is imported is the worker's.
    """
    if targets:
        words = [*_PROGRAM, "worker", *targets, "--only-load"]
        done = subprocess.run(words, capture_output=True, text=True, check=False)  # nosec B603 # ourselves
        if done.returncode:
            raise UsageError(done.stderr.strip().splitlines()[-1].removeprefix("tenure: "))


def _check_free(wish: Wish) -> None:
    """Refuse early, before anything runs, with the way out."""
    other = running_up(wish.data)
    if other is not None:
        raise Failed(
            Exit.CONFLICT,
            f"`tenure up` already runs here (pid {other.pid}, {other.gateway_url}); "
            "stop it, or start another with --data and --port",
        )
    family = socket.AF_INET6 if ":" in wish.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((wish.host, wish.port))
        except OSError as error:
            raise Failed(
                Exit.CONFLICT,
                f"{wish.host}:{wish.port} cannot be used ({error.strerror}); "
                f"stop what listens there, or choose another: tenure up --port {wish.port + 1}",
            ) from None


async def _up(wish: Wish, config: Config) -> int:
    stop = asyncio.Event()
    private_folder(wish.data, mark=WORKER_KEY)
    flows = usable_flows(_say)
    around = Surroundings({})
    if any(flow.contract == "inbox" for flow in flows):
        around = await surroundings(config, wish.data, gateway_port=wish.port, samples=wish.samples)
    seen = {**child_environment(), **around.environment}
    supervisor = Supervisor(_say, seen, lambda text: paint(text, "dim", sys.stderr))
    with stopping_on_signals(stop, supervisor.hurry):
        async with contextlib.AsyncExitStack() as stack:
            redis_url = wish.redis_url or await _start_redis(wish, stack)
            stores = Stores(
                redis_url,
                wish.data,
                wish.gateway_url,
                _fresh_worker_key(wish.data),
                around.receiver_url,
                around.files,
                wish.postgres_url,
            )
            queues = [flow.queue_url(stores) for flow in flows]
            await _bring_schema(queues)
            await _check_store(queues[0])
            worked = [flow.served_at(stores) for flow in flows]
            await _start_receiver(around, supervisor, stack)
            await _start_parts(wish, queues, worked, stores.worker_key, supervisor, stack, stop)
            if stop.is_set():
                return Exit.OK
            _announce(wish, flows, stores, stack)
            if wish.samples:
                await _start_samples(wish, config, flows, stores, stack)
            await supervisor.until(stop)
            _say("stopping: running jobs may finish; Ctrl-C again stops at once")
    _say("stopped; the data stay in " + str(wish.data))
    return Exit.OK


async def _start_receiver(
    around: Surroundings, supervisor: Supervisor, stack: contextlib.AsyncExitStack
) -> None:
    """Before the others, so that it ends after the worker that still delivers."""
    if around.port:
        words = [*_PROGRAM, *around.receiver_words, "--parent", str(os.getpid())]
        await supervisor.start("receiver", words)
        stack.push_async_callback(supervisor.stop, "receiver", _RECEIVER_ENDS_WITHIN_S)


async def _start_redis(wish: Wish, stack: contextlib.AsyncExitStack) -> str:
    server = EmbeddedRedis(wish.data / "redis", with_password=True)
    await asyncio.to_thread(server.start)
    stack.push_async_callback(asyncio.to_thread, server.stop)
    _background(stack, _keep_store(server))
    return server.url


async def _keep_store(server: EmbeddedRedis) -> None:
    """A store that died comes back on the same port with the same data."""
    while True:
        await asyncio.sleep(_STORE_LOOK_EVERY_S)
        if server.pid is None:
            _say("the store ended: starting it again")
            try:
                await asyncio.to_thread(server.start)
            except StoreError as error:
                _say(f"the store does not start: {error}")
                continue
            _say(f"the store runs again (pid {server.pid})")


def _fresh_worker_key(folder: Path) -> Path:
    """A key that only this gateway and this worker know: good whether others exist or not."""
    from tenure.gateway.keys import new_key

    path = folder / WORKER_KEY
    _, text = new_key(("jobs:work",), "up", None, 0)
    write_private(path, text + "\n")
    return path


async def _check_store(queue_url: str) -> None:
    side = StoreSide(queue_url)
    try:
        await side.counts()
    finally:
        await side.close()


async def _bring_schema(queues: Sequence[str]) -> None:
    """What an older version left is brought to this one; a new SQLite file makes its own tables."""
    for url in map(parse_url, queues):
        if _has_schema(url) and (done := await migrated(url)):
            _say(f"{url.safe}: schema brought up to date ({', '.join(done)})")


def _has_schema(url: QueueUrl) -> bool:
    if url.store.startswith("sqlite"):
        return file_of(url.store).exists()
    return url.store.startswith("postgres")


async def _start_parts(
    wish: Wish,
    queues: list[str],
    worked: list[str],
    worker_key: Path,
    supervisor: Supervisor,
    stack: contextlib.AsyncExitStack,
    stop: asyncio.Event,
) -> None:
    """Worker and gateway, for all queues; the stack stops them in the reverse of this order."""
    mine = ["--parent", str(os.getpid())]
    gateway = [*_PROGRAM, "gateway", "--host", wish.host, "--port", str(wish.port), *mine]
    gateway += ["--worker-key-file", str(worker_key)]
    gateway += ["--admin-address", wish.admin_address] if wish.admin_address else []
    tasks = ["tenure.tasks", *wish.targets]
    worker = [*_PROGRAM, "worker", *tasks, "--samples", *mine]
    worker += ["--drain-timeout", str(wish.drain_timeout_s)]
    await supervisor.start("gateway", gateway, {"TENURE_GATEWAY_QUEUES": as_list(queues)})
    stack.push_async_callback(supervisor.stop, "gateway", _GATEWAY_ENDS_WITHIN_S)
    await until_ready(wish.gateway_url, supervisor, stop)  # the worker reaches the plane through it
    await supervisor.start("worker", worker, {"TENURE_WORKER_QUEUES": as_list(worked)})
    stack.push_async_callback(supervisor.stop, "worker", wish.drain_timeout_s + 5)


def _announce(
    wish: Wish, flows: Sequence[SampleFlow], stores: Stores, stack: contextlib.AsyncExitStack
) -> None:
    queues = [flow.queue_url(stores) for flow in flows]
    up = RunningUp(
        pid=os.getpid(),
        gateway_url=wish.gateway_url,
        queue_url=queues[0],
        redis_url=stores.redis_url,
        started_ms=time.time_ns() // 1_000_000,
        queues=queues,
    )
    announce_up(wish.data, up)
    stack.callback(withdraw_up, wish.data)
    lines = [flow.invitation(stores) for flow in flows if flow.invitation]
    calls = how_to_call(wish.data)
    urls = wish.gateway_url, wish.admin_url
    emit_text(welcome(*urls, list(filter(None, lines)), calls, samples=wish.samples))
    if wish.browser:
        webbrowser.open(wish.admin_url)


async def _start_samples(
    wish: Wish,
    config: Config,
    flows: Sequence[SampleFlow],
    stores: Stores,
    stack: contextlib.AsyncExitStack,
) -> None:
    from tenure.tasks import real_tasks

    real = await asyncio.to_thread(real_tasks, task_settings(config))
    folder = wish.data / "samples"
    place = Place(stores, folder, _say, frozenset(real), wish.node)
    for flow in flows:
        if flow.feed is not None:
            _background(stack, _fed(flow.contract, flow.feed(place)))


async def _fed(contract: str, feeding: Coroutine[Any, Any, None]) -> None:
    """Samples that break are told of; they are not what the rest stands on."""
    try:
        await feeding
    except Exception as error:
        _say(f"no more samples of {contract}: {type(error).__name__}: {error}")


def _background(stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Run beside the rest; ended with the stack."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)


def _say(text: str) -> None:
    note(f"{paint('      up | ', 'dim', sys.stderr)}{text}")
