"""The sample jobs of `tenure up`: for each contract a queue, its handlers and a producer.

One worker serves all these queues. Most sample jobs succeed, some need a second attempt, some fail
for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import random
import secrets
import shutil
import signal
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec

from tenure.cli.config import process_environment
from tenure.cli.console import safe_url
from tenure.contracts.bullmq import open_producer
from tenure.contracts.bullmq.schema import VIDEO_GENERATION, check
from tenure.contracts.omniq import Client
from tenure.core.errors import InvalidJob, NotFound, StoreError, UsageError
from tenure.core.job import NewJob
from tenure.core.outcome import Fatal
from tenure.core.process import describe_exit, read_lines, running, tied
from tenure.core.registry import open_ledger, open_queue
from tenure.store.embedded import locate_node
from tenure.tasks import TASKS, SampleFailure
from tenure.worker.job import Job
from tenure.worker.task import Task, task

_KEEP_MS = 3_600_000
_WAITING_MAX = 30


@dataclass(frozen=True, slots=True)
class Stores:
    """The stores of `tenure up`: a Redis, a folder for SQLite files, and a gateway.

    `worker_key` is the file with the key that workers send to the gateway. If `postgres_url` is
    set, the SQL contracts use it instead of SQLite. With samples there are also `files`, the folder
    that `file://` may name, and `receiver_url`, to which webhooks may be sent.
    """

    redis_url: str
    folder: Path = Path()
    gateway_url: str = ""
    worker_key: Path = Path()
    receiver_url: str = ""
    files: Path = Path()
    postgres_url: str = ""

    def database(self, file: str) -> str:
        """The store of an SQL contract: PostgreSQL if it is set, else a SQLite file."""
        return self.postgres_url or f"sqlite:///{self.folder / file}"


@dataclass(frozen=True, slots=True)
class SampleContext:
    """The arguments of a producer.

    `folder` is for its files and is kept between starts. Tasks in `real` have real handlers and get
    no samples. `node` permits the use of Node.js.
    """

    stores: Stores
    folder: Path
    say: Callable[[str], None]
    real: frozenset[str] = frozenset()
    node: bool = True


@dataclass(frozen=True, slots=True)
class SampleFlow:
    """The samples of a contract.

    `produce` submits jobs until cancelled; an outbox has none, because its inbox fills it. `tasks`
    are the handlers; the inbox uses its real ones. `invitation` is a line of at most 80 columns
    that tells how to reach the queue with another program. `needs` are modules of an extra.
    """

    contract: str
    queue_url: Callable[[Stores], str]
    produce: Callable[[SampleContext], Coroutine[Any, Any, None]] | None = None
    tasks: tuple[Task, ...] = ()
    invitation: Callable[[Stores], str] | None = None
    worker_url: Callable[[Stores], str] | None = None
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def served_at(self, stores: Stores) -> str:
        """The URL for the worker: `queue_url`, unless it goes through the gateway."""
        return (self.worker_url or self.queue_url)(stores)


async def _keep_submitting(
    context: SampleContext,
    url: str,
    submit: Callable[[int], Awaitable[object]],
    *,
    waiting: Sequence[str],
    per_s: float,
    pause_s_max: float = 2.0,
) -> None:
    """Call `submit` with 0, 1, 2 ... until cancelled; pause while too many jobs are `waiting`."""
    ledger, unreachable, number = open_ledger(url), False, 0
    try:
        while True:
            try:
                states = (await ledger.counts()).states
                if sum(states.get(state, 0) for state in waiting) < _WAITING_MAX:
                    await submit(number)
                    number += 1
                unreachable = False
            except StoreError as error:
                if not unreachable:
                    context.say(f"samples pause: {error}")
                unreachable = True
            await asyncio.sleep(1.0 if unreachable else min(random.expovariate(per_s), pause_s_max))
    finally:
        await ledger.close()


async def _fill_queue(
    context: SampleContext, url: str, make: Callable[[int], NewJob], **pace: Any
) -> None:
    queue = open_queue(url, worker_id=REQUESTER)
    try:
        await _keep_submitting(context, url, lambda number: queue.submit([make(number)]), **pace)
    finally:
        await queue.close()


def _failures(chance: random.Random) -> int:
    """How often a sample fails: 4 in 100 for good, 12 once."""
    draw = chance.random()
    return 9 if draw < 0.04 else 1 if draw < 0.16 else 0


# streams: about two jobs a second, of all six tasks without a real handler.

_PAYLOADS: dict[str, dict[str, Any]] = {
    "chat": {"prompt": "Say hello to whoever watches."},
    "plan": {"goal": "See a job from submit to done"},
    "code": {"prompt": "Print the numbers one to ten", "language": "Python"},
    "tool": {"tool": "none", "args": {}},
    "rag": {"question": "What is a lease?", "documents": ["A lease runs out by itself."]},
    "embed": {"input": ["work is never owned", "only leased"]},
}


def _streams_url(stores: Stores) -> str:
    return f"streams+{stores.redis_url}"


async def _produce_streams(context: SampleContext) -> None:
    if context.real:
        named = ", ".join(name for name in TASKS if name in context.real)
        context.say(f"no samples for {named}: these have real handlers")
    tasks = [name for name in TASKS if name not in context.real]
    if tasks:
        url, chance = _streams_url(context.stores), random.Random()

        def make(number: int) -> NewJob:
            return streams_sample(tasks[number % len(tasks)], chance)

        await _fill_queue(context, url, make, waiting=["queued"], per_s=2.0)


def streams_sample(task: str, chance: random.Random) -> NewJob:
    """A job whose payload tells its sample handler how to behave."""
    options = {
        "steps": chance.randint(3, 12),
        "delay_s": round(chance.uniform(0.02, 0.25), 3),
        "fail": _failures(chance),
    }
    payload = msgspec.json.encode({**_PAYLOADS[task], "sample": options})
    return NewJob(task=task, payload=payload, ttl_ms=_KEEP_MS)


# bullmq: videos. Our producer begins at once. If there is Node, npm installs the pinned package and
# Node's producer takes over; if that ends, ours continues.

_VIDEOS = "video-generation"
_NODE_SOURCES = Path(__file__).with_name("bullmq_node")
_NODE_ENDS_WITHIN_S = 3.0
_NPM_WITHIN_S = 300.0
# Only the pinned packages: no native extras, and no install scripts. `npm ci` would need the extras
# of every platform in the lock file.
_NPM_INSTALL = (
    *("install", "--no-save", "--omit=optional", "--ignore-scripts"),
    *("--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error"),
)
_VIDEO_SCHEMA = {
    **VIDEO_GENERATION,
    "properties": {
        **VIDEO_GENERATION["properties"],
        "sample": {"type": "object", "properties": {"fail": {"type": "integer", "minimum": 0}}},
    },
}
_VIDEO_OPTIONS: dict[str, Any] = {
    "attempts": 3,
    "backoff": {"type": "exponential", "delay": 500},
    "removeOnComplete": {"count": 1000},
    "removeOnFail": {"count": 1000},
}


def _bullmq_url(stores: Stores) -> str:
    """Under BullMQ's usual prefix, so that Node finds the queue by its name."""
    return f"bullmq+{stores.redis_url}?queue={_VIDEOS}"


def _bullmq_invitation(stores: Stores) -> str:
    """The line with which a Node user adds a job; the password is shown only on request."""
    line = f"from Node       new Queue('{_VIDEOS}', {{ connection: {{ url }} }})"
    return f"{line}\n{' ' * 18}url: tenure config show redis_url --reveal"


@task(_VIDEOS, timeout_s=60)
async def _make_video(job: Job) -> dict[str, Any]:
    """Make no video: report the scenes one by one, and return that it is a sample."""
    try:
        check(job.payload, _VIDEO_SCHEMA)
    except InvalidJob as error:
        raise Fatal(str(error)) from None
    scenes, options = job.payload["script"]["scenes"], job.payload.get("sample", {})
    for number, scene in enumerate(scenes):
        await asyncio.sleep(min(scene["duration"], 10) / 10)
        if job.attempt <= options.get("fail", 0):
            raise SampleFailure(f"scene {number + 1} was asked to fail")
        await job.report(round(100 * (number + 1) / len(scenes)), f"scene {number + 1}")
    return {"sample": True, "videoId": job.payload["videoId"], "scenes": len(scenes)}


async def _produce_bullmq(context: SampleContext) -> None:
    producing = asyncio.create_task(_add_videos(context))
    try:
        if found := await _node_producer(context):
            node, folder, package = found
            await _cancel(producing)
            context.say(f"Node's own {package} adds the jobs of {_VIDEOS!r} now")
            environment = {"REDIS_URL": context.stores.redis_url}  # it may contain a password
            async with _child([str(node), "main.mjs", _VIDEOS], folder, environment) as process:
                async for line in read_lines(process.stdout):
                    context.say(line)
                ended = describe_exit(await process.wait())
            context.say(f"Node's producer {ended}: ours goes on")
            producing = asyncio.create_task(_add_videos(context))
        await producing
    finally:
        await _cancel(producing)


async def _node_producer(context: SampleContext) -> tuple[Path, Path, str] | None:
    """Node, the folder of the program, and its package; None, with a message, without Node."""
    ours = f"the jobs of {_VIDEOS!r} come from our own producer"
    redis_url = context.stores.redis_url
    try:
        if not context.node:
            raise NotFound("Node is not asked for (--no-node)")
        if not redis_url.startswith(("redis://", "rediss://")):
            shown = safe_url(f"bullmq+{redis_url}").removeprefix("bullmq+")
            raise NotFound(f"Node does not know {shown}")
        return await _install_node_program(
            context.folder, lambda doing: context.say(f"{doing}; until then {ours}")
        )
    except NotFound as error:
        context.say(f"{error}: {ours}")
        return None


async def _add_videos(context: SampleContext) -> None:
    url, chance = _bullmq_url(context.stores), random.Random()
    producer = open_producer(url, schema=_VIDEO_SCHEMA)

    async def submit(number: int) -> None:
        urgent = {"priority": 1} if number % 5 == 4 else {}
        await producer.add(_VIDEOS, _sample_video(chance), **_VIDEO_OPTIONS, **urgent)

    try:
        states = ["waiting", "prioritized"]
        await _keep_submitting(context, url, submit, waiting=states, per_s=1.0)
    finally:
        await producer.close()


def _sample_video(chance: random.Random) -> dict[str, Any]:
    """A payload as in the contract's example, with options for its sample handler."""
    scenes = [
        {
            "sceneNumber": number + 1,
            "duration": chance.randint(1, 4),
            "voiceover": "Work is never owned, only leased.",
            "imagePrompt": "A house with a sign: to let",
        }
        for number in range(chance.randint(1, 4))
    ]
    return {
        "videoId": str(uuid4()),
        "userId": "sample-python",
        "script": {"title": "A sample", "scenes": scenes},
        "sample": {"fail": _failures(chance)},
    }


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _install_node_program(folder: Path, say: Callable[[str], None]) -> tuple[Path, Path, str]:
    """Have npm install the program and its pinned packages in the data folder, once.

    The folder's name contains a hash of the lock file. npm works in a temporary folder that is
    renamed when it has succeeded, so packages are complete or absent.
    """
    lock, program, listed = (
        (_NODE_SOURCES / name).read_bytes()
        for name in ("package-lock.json", "main.mjs", "package.json")
    )
    version = msgspec.json.decode(listed)["dependencies"]["bullmq"]
    target = folder / f"bullmq-{version}-{hashlib.sha256(lock + program).hexdigest()[:12]}"
    node = await asyncio.to_thread(locate_node)
    npm = _npm(node)
    if not target.exists():
        say(f"npm brings bullmq {version} into {target}")
        draft = folder / f".{target.name}.{secrets.token_hex(4)}"
        try:
            await asyncio.to_thread(shutil.copytree, _NODE_SOURCES, draft)
            await _run_npm(npm, draft)
            with contextlib.suppress(OSError):  # another process was faster
                draft.rename(target)
        finally:
            await asyncio.to_thread(shutil.rmtree, draft, ignore_errors=True)
    return node, target, f"bullmq {version}"


def _npm(node: Path) -> list[str]:
    """The npm on PATH, or the script that comes with this node."""
    if found := shutil.which("npm"):
        return [found]
    script = node.parent.parent / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    if not script.exists():
        raise NotFound(f"Node is here ({node}) but npm is not")
    return [str(node), str(script)]


async def _run_npm(npm: Sequence[str], folder: Path) -> None:
    lines: list[str] = []
    async with _child([*npm, *_NPM_INSTALL], folder, {}) as process:
        try:
            async with asyncio.timeout(_NPM_WITHIN_S):
                lines = [line async for line in read_lines(process.stdout)]
                code = await process.wait()
        except TimeoutError:
            raise NotFound(f"npm was not done after {_NPM_WITHIN_S:g} s") from None
    if code:
        reason = next((line for line in lines if line.strip()), "it printed nothing")
        raise NotFound(f"npm could not bring the package ({reason.strip()})")


def _child(
    command: Sequence[str], folder: Path, environment: Mapping[str, str]
) -> AbstractAsyncContextManager[asyncio.subprocess.Process]:
    """A child process that ends with the block, and dies with this process."""
    env = {**process_environment(), **environment}
    argv = tied(command, dies_by=signal.SIGKILL)
    return running(argv, grace_s=_NODE_ENDS_WITHIN_S, cwd=folder, env=env)


# omniq: letters of five tenants. Each tenant is a group with a limit of two running letters, so the
# tenant that writes far more than the others does not hold them up.

_LETTERS = "letters"
_TENANTS = ("acme", "acme", "acme", "acme", "birch", "cedar", "dune", "elm")


def _omniq_url(stores: Stores) -> str:
    return f"omniq+{stores.redis_url}?queue={_LETTERS}"


@task(_LETTERS, timeout_s=60)
async def _send_letter(job: Job) -> dict[str, Any]:
    """Send no letter: wait a moment, and return that it is a sample."""
    options = job.payload.get("sample", {})
    await asyncio.sleep(min(options.get("seconds", 0.2), 5))
    if job.attempt <= options.get("fail", 0):
        raise SampleFailure("this letter was asked to fail")
    return {"sample": True, "tenant": job.payload.get("tenant", "")}


async def _produce_omniq(context: SampleContext) -> None:
    chance, client = random.Random(), Client(context.stores.redis_url)

    async def submit(number: int) -> None:
        tenant = chance.choice(_TENANTS)
        options = {"seconds": round(chance.uniform(0.1, 1.5), 2), "fail": _failures(chance)}
        letter = {"tenant": tenant, "to": f"reader-{number}@{tenant}.test", "sample": options}
        retry: dict[str, Any] = {"backoff_ms": 500, "backoff": "exponential"}
        await client.publish(_LETTERS, letter, gid=tenant, group_limit=2, **retry)

    try:
        url = _omniq_url(context.stores)
        await _keep_submitting(context, url, submit, waiting=["wait"], per_s=2.0)
    finally:
        await client.close()


# plane: the gateway is the plane, and the worker uses it over HTTP. The producer writes directly to
# the store. Jobs of the stream `reports:now` come first.

_STREAMS = ("reports:now", "reports:later")


def _plane_url(stores: Stores) -> str:
    query = f"streams={','.join(_STREAMS)}&keep_ms={_KEEP_MS}&lease_ms=30000"
    return f"plane+{stores.database('plane.db')}?{query}"


def _plane_worker_url(stores: Stores) -> str:
    """The same plane through the gateway, which is all that a worker has to reach."""
    query = f"streams={','.join(_STREAMS)}&key_file={quote(str(stores.worker_key))}"
    return f"plane+{stores.gateway_url}?{query}"


def _plane_invitation(stores: Stores) -> str:
    return f"work from bash  examples/plane_worker.sh {stores.gateway_url} {_STREAMS[1]} cat"


@task("report")
async def _write_report(job: Job) -> dict[str, Any]:
    """Write a report of some pages; fails if the sample asks for it."""
    options = job.payload
    began_s = asyncio.get_running_loop().time()
    for page in range(options["pages"]):
        await asyncio.sleep(options["delay_s"])
        await job.report(round(100 * (page + 1) / options["pages"]), f"page {page + 1}")
    if job.attempt <= options["fail"]:
        raise RuntimeError("the printer is out of paper")
    took_ms = round((asyncio.get_running_loop().time() - began_s) * 1000)
    return {
        "artifacts": [{"name": "report.txt", "pages": options["pages"]}],
        "timings": {"write_ms": took_ms},
    }


async def _produce_plane(context: SampleContext) -> None:
    chance = random.Random()

    def make(number: int) -> NewJob:
        payload = {
            "pages": chance.randint(2, 6),
            "delay_s": round(chance.uniform(0.05, 0.3), 3),
            "fail": _failures(chance),
        }
        stream = _STREAMS[0] if number % 4 == 0 else _STREAMS[1]
        raw = msgspec.json.encode(payload)
        return NewJob(task="report", payload=raw, max_attempts=3, options={"stream": stream})

    await _fill_queue(context, _plane_url(context.stores), make, waiting=["QUEUED"], per_s=1.0)


# inbox: transcodes of a tiny clip, with webhooks. Inbox and outbox are two queues of one database.
# ffmpeg draws the clip once. It and its outputs are in the one folder that `file://` may name. One
# job in ten has a source that is no media file and fails for good.

REQUESTER = "tenure-samples"
_NEEDS = ("cryptography", "httptools", "obstore")
_OUTPUTS_KEPT = 100
_DRAWN_WITHIN_S = 60.0
_DRAWING = ("-f", "lavfi", "-i", "testsrc=size=160x120:rate=10:duration=2", "-pix_fmt", "yuv420p")
_OUTPUTS = (
    {"name": "small.mp4", "format": "mp4", "height": 96, "video_kbps": 50},
    {"name": "poster.jpg", "format": "jpg"},
)


def _inbox_url(stores: Stores) -> str:
    """The inbox; POST /transcode fills it as well."""
    return f"inbox+{stores.database('inbox.db')}?keep_ms={_KEEP_MS}"


def _outbox_url(stores: Stores) -> str:
    return f"{_inbox_url(stores)}&box=outbox"


def _inbox_invitation(stores: Stores) -> str:
    if not stores.receiver_url:
        return ""
    return f"see webhooks    {stores.receiver_url}/ shows those of the transcodes, verified"


async def _produce_inbox(context: SampleContext) -> None:
    folder, receiver_url = context.stores.files, context.stores.receiver_url
    try:
        await asyncio.to_thread(draw_clip, folder)
    except UsageError as error:
        context.say(f"no samples of transcoding: {error}")
        return

    def make(number: int) -> NewJob:
        _remove_old(folder / "out")
        return inbox_sample(number, folder, receiver_url)

    url = _inbox_url(context.stores)
    await _fill_queue(context, url, make, waiting=["queued"], per_s=1 / 20, pause_s_max=30.0)


def inbox_sample(number: int, folder: Path, receiver_url: str) -> NewJob:
    """A transcode of the clip; every tenth job has a source that is no media file."""
    source = folder / ("no-clip.txt" if number % 10 == 9 else "clip.mp4")
    payload = {
        "source": {"url": source.as_uri()},
        "outputs": _OUTPUTS,
        "destination": {"url": (folder / "out").as_uri()},
    }
    return NewJob(
        task="transcode",
        payload=msgspec.json.encode(payload),
        requester=REQUESTER,
        max_attempts=3,
        options={"status_webhook_url": f"{receiver_url}/hooks"},
    )


def draw_clip(folder: Path) -> None:
    """Have ffmpeg draw a clip of two seconds, unless there is one; raises `UsageError`."""
    from tenure.transcode.ffmpeg import locate_ffmpeg

    program = locate_ffmpeg()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / "no-clip.txt").write_text("Nothing to be seen here.\n")
    if (folder / "clip.mp4").exists():
        return
    draft = folder / f".clip.{os.getpid()}.mp4"
    command = [str(program), "-nostdin", "-y", "-loglevel", "error", *_DRAWING, str(draft)]
    try:
        done = subprocess.run(  # nosec B603 # ffmpeg, as the transcoder finds it
            command, check=False, capture_output=True, timeout=_DRAWN_WITHIN_S
        )
        if done.returncode:
            reason = done.stderr.decode(errors="replace").strip()[-200:]
            raise UsageError(f"ffmpeg drew no clip ({done.returncode}): {reason}")
        draft.replace(folder / "clip.mp4")
    except subprocess.TimeoutExpired:
        raise UsageError(f"ffmpeg drew no clip within {_DRAWN_WITHIN_S:g} s") from None
    finally:
        draft.unlink(missing_ok=True)


def _remove_old(outputs: Path) -> None:
    """Remove the oldest outputs. Job ids begin with their time, so the first by name are oldest."""
    if outputs.is_dir():
        for old in sorted(outputs.iterdir())[:-_OUTPUTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


FLOWS = (
    SampleFlow("streams", _streams_url, _produce_streams),
    SampleFlow("bullmq", _bullmq_url, _produce_bullmq, (_make_video,), _bullmq_invitation),
    SampleFlow("omniq", _omniq_url, _produce_omniq, (_send_letter,)),
    SampleFlow(
        "plane", _plane_url, _produce_plane, (_write_report,), _plane_invitation, _plane_worker_url
    ),
    SampleFlow("inbox", _inbox_url, _produce_inbox, invitation=_inbox_invitation, needs=_NEEDS),
    SampleFlow("inbox", _outbox_url, needs=_NEEDS),
)
"""Other commands use the queue of the first flow by default."""


def usable_flows(say: Callable[[str], None]) -> list[SampleFlow]:
    """The flows whose modules are installed; `say` gets what the others lack."""
    missing = {flow.contract: flow.missing() for flow in FLOWS if flow.missing()}
    for contract, names in missing.items():
        say(
            f"without {contract}: not installed are {', '.join(names)} "
            "(pip install 'tenure[transcode]')"
        )
    return [flow for flow in FLOWS if flow.contract not in missing]
