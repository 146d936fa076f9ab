"""`tenure up`: everything on one machine with one command.

It starts a Redis (unless one is given), a gateway and a worker as child processes, sample jobs, and
a receiver for their webhooks. Ctrl-C stops the samples, the worker (which finishes its jobs), the
gateway, the receiver and the store, in this order.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
import webbrowser
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from tenure.cli.config import (
    Config,
    announce_up,
    as_list,
    browser_possible,
    child_environment,
    load_config,
    process_environment,
    withdraw_up,
)
from tenure.cli.console import Exit, Failed, emit_text, note, note_child_line, paint
from tenure.cli.gateway_client import fetch
from tenure.cli.handlers import task_settings
from tenure.cli.project import migrated
from tenure.core.config import DATA_FOLDER, RunningUp, running_up
from tenure.core.errors import StoreError, UsageError
from tenure.core.process import Supervisor, stop_on_signals
from tenure.core.registry import QueueUrl, contracts, open_ledger, parse_url
from tenure.samples import REQUESTER, SampleContext, SampleFlow, Stores, usable_flows
from tenure.store.embedded import EmbeddedRedis
from tenure.store.files import private_folder, write_private
from tenure.store.sqlite import file_of

HOST = "127.0.0.1"  # the receiver's address
_GATEWAY_ENDS_WITHIN_S = 15.0
_RECEIVER_ENDS_WITHIN_S = 5.0
_READY_WITHIN_S = 60.0
_READY_POLL_S = 0.05
_STORE_POLL_S = 0.5
# -P: modules in the current folder, where other users may write, are not imported.
_PROGRAM = (sys.executable, "-P", "-m", "tenure.cli")
_WORKER_KEY = "worker.key"


@dataclass(frozen=True, slots=True)
class UpOptions:
    """The options of `tenure up`, from flags and settings."""

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
        """The gateway's URL on this machine."""
        return _url(self.host, self.port)

    @property
    def admin_url(self) -> str:
        """The URL of the dashboard and the metrics on this machine."""
        if not self.admin_address:
            return self.gateway_url
        from tenure.gateway.settings import split_address

        return _url(*split_address(self.admin_address))


def _url(host: str, port: int) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)  # nosec B104 # not to bind to
    return f"http://{f'[{host}]' if ':' in host and host[0] != '[' else host}:{port}"


@click.command("up")
@click.argument("targets", metavar="[APP.py|MODULE]...", nargs=-1)
@click.option("--port", type=click.IntRange(1, 65535), help="The gateway's port (8470).")
@click.option("--host", help="The gateway's address (127.0.0.1).")
@click.option("--admin-address", metavar="HOST:PORT", help="Serve admins and observers only there.")
@click.option("--data", type=click.Path(path_type=Path), help="The data folder (.tenure).")
@click.option("--redis", "redis_url", metavar="URL", help="Use this Redis; start none.")
@click.option(
    "--postgres", "postgres_url", metavar="URL", help="Keep inbox and plane there, not in SQLite."
)
@click.option("--no-browser", is_flag=True, help="Do not open the dashboard in a browser.")
@click.option("--no-samples", is_flag=True, help="Submit no sample jobs, receive no webhooks.")
@click.option(
    "--no-node", is_flag=True, help="Do not install and run Node.js packages for samples."
)
def up_command(
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
    options = UpOptions(
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
    _check_tasks(options.targets)
    _check_free(options)
    return asyncio.run(_up(options, config))


def _check_tasks(targets: Sequence[str]) -> None:
    """Load the handlers once, in another process, so that a broken file ends `up` at once."""
    if targets:
        command = [*_PROGRAM, "worker", *targets, "--only-load"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # nosec B603 # ourselves
        if done.returncode:
            raise UsageError(done.stderr.strip().splitlines()[-1].removeprefix("tenure: "))


def _check_free(options: UpOptions) -> None:
    """Raise if `up` already runs here or the port is taken, before anything is started."""
    other = running_up(options.data)
    if other is not None:
        raise Failed(
            Exit.CONFLICT,
            f"`tenure up` already runs here (pid {other.pid}, {other.gateway_url}); "
            "stop it, or start another with --data and --port",
        )
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((options.host, options.port))
        except OSError as error:
            raise Failed(
                Exit.CONFLICT,
                f"{options.host}:{options.port} cannot be used ({error.strerror}); "
                f"stop what listens there, or choose another: tenure up --port {options.port + 1}",
            ) from None


async def _up(options: UpOptions, config: Config) -> int:
    stop = asyncio.Event()
    private_folder(options.data, mark=_WORKER_KEY)
    flows = usable_flows(_say)
    setup = _InboxSetup({})
    if any("credentials" in contracts()[flow.contract].parts for flow in flows):
        setup = await set_up_inbox(
            config, options.data, gateway_port=options.port, samples=options.samples
        )
    environment = {**child_environment(), **setup.environment}
    supervisor = Supervisor(_say, environment, note_child_line)
    with stop_on_signals(stop, supervisor.stop_now):
        async with contextlib.AsyncExitStack() as stack:
            redis_url = options.redis_url or await _start_redis(options, stack)
            stores = Stores(
                redis_url,
                options.data,
                options.gateway_url,
                _fresh_worker_key(options.data),
                setup.receiver_url,
                setup.files,
                options.postgres_url,
            )
            queues = [flow.queue_url(stores) for flow in flows]
            await _migrate(queues)
            await _check_store(queues[0])
            worker_urls = [flow.served_at(stores) for flow in flows]
            await _start_receiver(setup, supervisor, stack)
            await _start_gateway_and_worker(
                options, queues, worker_urls, stores.worker_key, supervisor, stack, stop
            )
            if stop.is_set():
                return Exit.OK
            _announce(options, flows, stores, stack)
            if options.samples:
                await _start_samples(options, config, flows, stores, stack)
            await supervisor.until(stop)
            _say("stopping: running jobs may finish; Ctrl-C again stops at once")
    _say("stopped; the data stay in " + str(options.data))
    return Exit.OK


async def _start_receiver(
    setup: _InboxSetup, supervisor: Supervisor, stack: contextlib.AsyncExitStack
) -> None:
    """Start the receiver before the worker, so that it ends after the worker's deliveries."""
    if setup.port:
        receiver = ["receiver", "--port", str(setup.port), "--requester", REQUESTER]
        await supervisor.start("receiver", [*_PROGRAM, *receiver])
        stack.push_async_callback(supervisor.stop, "receiver", _RECEIVER_ENDS_WITHIN_S)


async def _start_redis(options: UpOptions, stack: contextlib.AsyncExitStack) -> str:
    server = EmbeddedRedis(options.data / "redis", with_password=True)
    await asyncio.to_thread(server.start)
    stack.push_async_callback(asyncio.to_thread, server.stop)
    _background(stack, _restart_store(server))
    return server.url


async def _restart_store(server: EmbeddedRedis) -> None:
    """Restart a store that died, on the same port with the same data."""
    while True:
        await asyncio.sleep(_STORE_POLL_S)
        if server.pid is None:
            _say("the store ended: starting it again")
            try:
                await asyncio.to_thread(server.start)
            except StoreError as error:
                _say(f"the store does not start: {error}")
                continue
            _say(f"the store runs again (pid {server.pid})")


def _fresh_worker_key(folder: Path) -> Path:
    """A new key that only this gateway and this worker know."""
    from tenure.gateway.keys import new_key

    path = folder / _WORKER_KEY
    _, text = new_key(("jobs:work",), "up", None, 0)
    write_private(path, text + "\n")
    return path


async def _check_store(queue_url: str) -> None:
    ledger = open_ledger(queue_url)
    try:
        await ledger.counts()
    finally:
        await ledger.close()


async def _migrate(queues: Sequence[str]) -> None:
    """Migrate databases of an older version; a new SQLite file gets its tables when opened."""
    for url in map(parse_url, queues):
        if _has_schema(url) and (done := await migrated(url)):
            _say(f"{url.safe}: schema brought up to date ({', '.join(done)})")


def _has_schema(url: QueueUrl) -> bool:
    if url.store.startswith("sqlite"):
        return file_of(url.store).exists()
    return url.store.startswith("postgres")


async def _start_gateway_and_worker(
    options: UpOptions,
    queues: list[str],
    worker_urls: list[str],
    worker_key: Path,
    supervisor: Supervisor,
    stack: contextlib.AsyncExitStack,
    stop: asyncio.Event,
) -> None:
    """Start both for all queues; the stack stops them in reverse order."""
    gateway = [*_PROGRAM, "gateway", "--host", options.host, "--port", str(options.port)]
    gateway += ["--worker-key-file", str(worker_key)]
    gateway += ["--admin-address", options.admin_address] if options.admin_address else []
    tasks = ["tenure.tasks", *options.targets]
    worker = [*_PROGRAM, "worker", *tasks, "--samples"]
    worker += ["--drain-timeout", str(options.drain_timeout_s)]
    await supervisor.start("gateway", gateway, {"TENURE_GATEWAY_QUEUES": as_list(queues)})
    stack.push_async_callback(supervisor.stop, "gateway", _GATEWAY_ENDS_WITHIN_S)
    # The worker reaches the plane through the gateway.
    await _until_ready(options.gateway_url, supervisor, stop)
    await supervisor.start("worker", worker, {"TENURE_WORKER_QUEUES": as_list(worker_urls)})
    stack.push_async_callback(supervisor.stop, "worker", options.drain_timeout_s + 5)


async def _until_ready(gateway_url: str, supervisor: Supervisor, stop: asyncio.Event) -> None:
    """Wait until the gateway answers or `stop` is set; raises if a child cannot start."""
    deadline = time.monotonic() + _READY_WITHIN_S
    while not stop.is_set():
        if supervisor.broken.done():
            supervisor.broken.result()
        if await asyncio.to_thread(_is_ready, gateway_url):
            return
        if time.monotonic() > deadline:
            raise Failed(
                Exit.TIMEOUT,
                f"the gateway did not answer within {_READY_WITHIN_S:g} s; its output is above",
            )
        await asyncio.sleep(_READY_POLL_S)


def _is_ready(gateway_url: str) -> bool:
    try:
        return fetch(f"{gateway_url}/readyz", 2)[0] == 200
    except OSError:
        return False


def _announce(
    options: UpOptions,
    flows: Sequence[SampleFlow],
    stores: Stores,
    stack: contextlib.AsyncExitStack,
) -> None:
    queues = [flow.queue_url(stores) for flow in flows]
    up = RunningUp(
        pid=os.getpid(),
        gateway_url=options.gateway_url,
        queue_url=queues[0],
        redis_url=stores.redis_url,
        started_ms=time.time_ns() // 1_000_000,
        queues=queues,
    )
    announce_up(options.data, up)
    stack.callback(withdraw_up, options.data)
    lines = [flow.hint(stores) for flow in flows if flow.hint]
    calls = how_to_call(options.data)
    urls = options.gateway_url, options.admin_url
    emit_text(welcome(*urls, list(filter(None, lines)), calls, samples=options.samples))
    if options.browser:
        webbrowser.open(options.admin_url)


def _background(stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, None]) -> None:
    """Run a task until the stack is closed."""
    task = asyncio.create_task(work)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)


def _say(text: str) -> None:
    note(f"{paint('      up | ', 'dim', sys.stderr)}{text}")


async def _start_samples(
    options: UpOptions,
    config: Config,
    flows: Sequence[SampleFlow],
    stores: Stores,
    stack: contextlib.AsyncExitStack,
) -> None:
    from tenure.tasks import real_tasks

    real = await asyncio.to_thread(real_tasks, task_settings(config))
    folder = options.data / "samples"
    context = SampleContext(
        stores=stores,
        folder=folder,
        say=_say,
        environment=process_environment(),
        locate_ffmpeg=_locate_ffmpeg,
        real=frozenset(real),
        node=options.node,
    )
    for flow in flows:
        if flow.produce is not None:
            _background(stack, _report_failure(flow.contract, flow.produce(context)))


def _locate_ffmpeg() -> Path:
    from tenure.transcode.ffmpeg import locate_ffmpeg  # of an optional extra

    return locate_ffmpeg()


async def _report_failure(contract: str, producing: Coroutine[Any, Any, None]) -> None:
    """Report a producer that fails, without stopping the rest."""
    try:
        await producing
    except Exception as error:
        _say(f"no more samples of {contract}: {type(error).__name__}: {error}")


@dataclass(frozen=True, slots=True)
class _InboxSetup:
    """Settings of the inbox for the children, the receiver's port (0: none), and its files."""

    environment: Mapping[str, str]
    port: int = 0
    files: Path = Path()

    @property
    def receiver_url(self) -> str:
        """The page of the receiver, with /hooks below it; "" without a receiver."""
        return f"http://{HOST}:{self.port}" if self.port else ""


async def set_up_inbox(
    config: Config, data: Path, *, gateway_port: int, samples: bool
) -> _InboxSetup:
    """Make a key ring if none is set, and with `samples` the settings of the receiver.

    Webhooks may go to the receiver's port, and `file://` may name one folder: without these two
    permissions the inbox cannot be tried on one machine. The operator's own settings stay.
    """
    environment: dict[str, str] = {}
    if not config.is_set("vault.keys") and not config.is_set("vault.kms"):
        environment["TENURE_VAULT_KEYS_FILE"] = str(key_ring_file(data))
    if not samples:
        return _InboxSetup(environment)
    port = port_above(gateway_port)
    allowed = [*config.texts("egress.allow"), f"{HOST}:{port}"]
    environment["TENURE_EGRESS_ALLOW"] = ",".join(allowed)
    environment["TENURE_WEBHOOKS_SECRETS"] = await _secrets(config.text("webhooks.secrets"))
    if folder := config.text("transcode.files"):
        return _InboxSetup(environment, port, _samples_folder(folder))
    environment["TENURE_TRANSCODE_FILES"] = str(data / "transcode")
    return _InboxSetup(environment, port, data / "transcode")


def _samples_folder(folder: str) -> Path:
    return Path(folder).expanduser().absolute() / REQUESTER


def key_ring_file(data: Path) -> Path:
    """The file of the key ring, made at the first start."""
    from tenure.vault import new_kek

    path = data / "vault.keys"
    if path.exists():
        return path
    # Made durable before it is used: without the key, encrypted credentials are lost.
    write_private(path, new_kek(f"kek-{datetime.now(UTC):%Y-%m-%d}") + "\n")
    return path


def port_above(port: int) -> int:
    """A free port at least ten above, the same one at every start if possible.

    The next port is left free, because error messages recommend it for a second `tenure up`.
    """
    for each in [*(p for p in range(port + 10, port + 20) if p < 65_536), 0]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, each))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("this machine has no free port")


async def _secrets(configured: str) -> str:
    """The operator's secrets, with a new one for the samples if they have none."""
    from tenure.webhooks import new_secret
    from tenure.webhooks.signing import read_secrets

    if await read_secrets(configured).live(REQUESTER):
        return configured
    # Without any secrets of the operator, ours is for every requester of POST /transcode.
    whose = REQUESTER if configured.strip() else "*"
    return f"{configured}\n{whose} = {new_secret()}\n"


def welcome(url: str, pages: str, hints: Sequence[str], program: str, *, samples: bool) -> str:
    """The addresses, and commands to try; `pages` is the URL of the dashboard."""
    flowing = "sample jobs are flowing" if samples else "waiting for jobs"
    metrics = f"{pages}/metrics"
    more = "".join(f"\n  {line}" for line in hints)
    return f"""\
{paint(f"tenure is up: {pages}", "bold")}   API {url}/docs   metrics {metrics}   ({flowing})

  submit a job    curl -s {url}/v1/jobs -H 'Content-Type: application/json' \\
                    -d '{{"task": "chat", "payload": {{"prompt": "hello"}}}}'
  follow it       curl -sN {url}/v1/jobs/ID/events
  read it         curl -s {url}/v1/jobs/ID{more}

  or: {program} submit chat -d '{{"prompt": "hello"}}' --follow
      {program} ls        {program} queues        {program} top
  Ctrl-C drains and stops."""


def how_to_call(data: Path) -> str:
    """`tenure`, or its path if a shell would not find it by that name.

    If the data folder is not the default, TENURE_DATA comes first.
    """
    mine = Path(sys.executable).with_name("tenure")
    found = shutil.which("tenure")
    program = str(mine)
    if found is not None and Path(found).samefile(mine):
        program = "tenure"
    else:
        with contextlib.suppress(ValueError):
            program = str(mine.relative_to(Path.cwd()))
    is_usual = data.resolve() == Path(DATA_FOLDER).resolve()
    return program if is_usual else f"TENURE_DATA={shlex.quote(str(data))} {program}"
