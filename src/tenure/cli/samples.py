"""The sample jobs of `tenure up`: for each contract a queue, its handlers and a feeder.

`tenure up` serves all these queues with one worker. Most sample jobs succeed, some need a second
attempt, some fail for good.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote
from uuid import uuid4

import msgspec

from tenure.cli.node import NodeProgram, NodeUnusable, prepare
from tenure.cli.output import safe_url
from tenure.contracts.bullmq import open_producer
from tenure.contracts.bullmq.schema import VIDEO_GENERATION, check
from tenure.contracts.omniq import Client
from tenure.core.errors import InvalidJob, StoreError, UsageError
from tenure.core.job import NewJob
from tenure.core.outcome import Fatal
from tenure.core.registry import open_ledger, open_queue
from tenure.tasks import TASKS, SampleFailure
from tenure.worker.decorator import task
from tenure.worker.job import Job
from tenure.worker.task import Task

_KEEP_MS = 3_600_000
_WAITING_MAX = 30


@dataclass(frozen=True, slots=True)
class Stores:
    """What `tenure up` has: a Redis, a folder for files, and the gateway before them.

    `worker_key` is a file with the key that workers show to the gateway. `postgres_url` is "" where
    the SQL contracts keep their jobs in SQLite files in that folder. With samples there are
    `files`, the folder that `file://` may name, and `receiver_url`, to which webhooks may be sent.
    """

    redis_url: str
    folder: Path = Path()
    gateway_url: str = ""
    worker_key: Path = Path()
    receiver_url: str = ""
    files: Path = Path()
    postgres_url: str = ""

    def database(self, file: str) -> str:
        """The store of an SQL contract: PostgreSQL if there is one, else a file of this name."""
        return self.postgres_url or f"sqlite:///{self.folder / file}"


@dataclass(frozen=True, slots=True)
class SampleContext:
    """What a feeder is given.

    `folder` is for its files and stays from one start to the next; `real` are the tasks that have
    real handlers and get no samples; `node` says whether Node.js may be used.
    """

    stores: Stores
    folder: Path
    say: Callable[[str], None]
    real: frozenset[str] = frozenset()
    node: bool = True


@dataclass(frozen=True, slots=True)
class SampleFlow:
    """The samples of a contract.

    `feed` submits jobs until cancelled; an outbox has none, because its inbox fills it.
    `tasks` are its handlers; the inbox has its real ones. `invitation` is a line of at most 80
    columns that says how to reach the queue with a program of one's own. `needs` are modules of an
    optional extra.
    """

    contract: str
    queue_url: Callable[[Stores], str]
    feed: Callable[[SampleContext], Coroutine[Any, Any, None]] | None = None
    tasks: tuple[Task, ...] = ()
    invitation: Callable[[Stores], str] | None = None
    worker_url: Callable[[Stores], str] | None = None
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [name for name in self.needs if find_spec(name) is None]

    def served_at(self, stores: Stores) -> str:
        """Where the worker finds the queue: `queue_url`, unless it goes through the gateway."""
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
    """Call `submit` with 0, 1, 2 ... until cancelled, unless too many jobs are `waiting`."""
    ledger, away, number = open_ledger(url), False, 0
    try:
        while True:
            try:
                states = (await ledger.counts()).states
                if sum(states.get(state, 0) for state in waiting) < _WAITING_MAX:
                    await submit(number)
                    number += 1
                away = False
            except StoreError as error:
                if not away:
                    context.say(f"samples pause: {error}")
                away = True
            await asyncio.sleep(1.0 if away else min(random.expovariate(per_s), pause_s_max))
    finally:
        await ledger.close()


async def _feed_queue(
    context: SampleContext, url: str, make: Callable[[int], NewJob], **pace: Any
) -> None:
    queue = open_queue(url, worker_id=REQUESTER)
    try:
        await _keep_submitting(context, url, lambda number: queue.submit([make(number)]), **pace)
    finally:
        await queue.close()


def failures(chance: random.Random) -> int:
    """How often a sample shall fail: 4 in 100 for good, 12 once."""
    draw = chance.random()
    return 9 if draw < 0.04 else 1 if draw < 0.16 else 0


# streams: about two jobs a second, of all six tasks. A task with a real handler gets none.

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


async def _feed_streams(context: SampleContext) -> None:
    if context.real:
        named = ", ".join(name for name in TASKS if name in context.real)
        context.say(f"no samples for {named}: these have real handlers")
    tasks = [name for name in TASKS if name not in context.real]
    if tasks:
        chance = random.Random()
        await _feed_queue(
            context,
            _streams_url(context.stores),
            lambda number: streams_sample(tasks[number % len(tasks)], chance),
            waiting=["queued"],
            per_s=2.0,
        )


def streams_sample(task: str, chance: random.Random) -> NewJob:
    """A job whose payload says how its sample handler shall behave."""
    play = {
        "steps": chance.randint(3, 12),
        "delay_s": round(chance.uniform(0.02, 0.25), 3),
        "fail": failures(chance),
    }
    payload = msgspec.json.encode({**_PAYLOADS[task], "sample": play})
    return NewJob(task=task, payload=payload, ttl_ms=_KEEP_MS)


# bullmq: videos, added by Node's own package where there is Node. Our producer begins at once;
# when npm has brought the pinned package, Node's takes over, and should that end, ours goes on.

_VIDEOS = "video-generation"
_NODE_SOURCES = Path(__file__).with_name("bullmq_node")
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
    """What a Node user writes to add a job; the password is shown only on request."""
    line = f"from Node       new Queue('{_VIDEOS}', {{ connection: {{ url }} }})"
    return f"{line}\n{' ' * 18}url: tenure config show redis_url --reveal"


@task(_VIDEOS, timeout_s=60)
async def _make_video(job: Job) -> dict[str, Any]:
    """Make no video: report the scenes one by one, and say that it is a sample."""
    try:
        check(job.payload, _VIDEO_SCHEMA)
    except InvalidJob as error:
        raise Fatal(str(error)) from None
    scenes, play = job.payload["script"]["scenes"], job.payload.get("sample", {})
    for number, scene in enumerate(scenes):
        await asyncio.sleep(min(scene["duration"], 10) / 10)
        if job.attempt <= play.get("fail", 0):
            raise SampleFailure(f"scene {number + 1} was asked to fail")
        await job.report(round(100 * (number + 1) / len(scenes)), f"scene {number + 1}")
    return {"sample": True, "videoId": job.payload["videoId"], "scenes": len(scenes)}


async def _feed_bullmq(context: SampleContext) -> None:
    feeding = asyncio.create_task(_add_videos(context))
    try:
        program = await _node_producer(context)
        if program is not None:
            await _cancelled(feeding)
            context.say(f"Node's own {program.package} adds the jobs of {_VIDEOS!r} now")
            environment = {"REDIS_URL": context.stores.redis_url}  # it may hold a password
            why = await program.run(_VIDEOS, environment=environment, say=context.say)
            context.say(f"Node's producer {why}: ours goes on")
            feeding = asyncio.create_task(_add_videos(context))
        await feeding
    finally:
        await _cancelled(feeding)


async def _node_producer(context: SampleContext) -> NodeProgram | None:
    """Node's producer, ready to run; None, with a message, if it cannot be used."""
    ours = f"the jobs of {_VIDEOS!r} come from our own producer"
    redis_url = context.stores.redis_url
    if not context.node:
        context.say(f"Node is not asked for (--no-node): {ours}")
        return None
    if not redis_url.startswith(("redis://", "rediss://")):
        shown = safe_url(f"bullmq+{redis_url}").removeprefix("bullmq+")
        context.say(f"Node does not know {shown}: {ours}")
        return None
    try:
        return await prepare(
            _NODE_SOURCES,
            context.folder,
            "bullmq",
            say=lambda doing: context.say(f"{doing}; until then {ours}"),
        )
    except NodeUnusable as error:
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
    """A payload as in the contract's example, and how its handler shall behave."""
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
        "sample": {"fail": failures(chance)},
    }


async def _cancelled(running: asyncio.Task[None]) -> None:
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


# omniq: letters of five tenants, each tenant a group with a limit. One tenant writes far more than
# the others: never more than two of its letters run at once, and the others do not wait behind it.

_LETTERS = "letters"
_TENANTS = ("acme", "acme", "acme", "acme", "birch", "cedar", "dune", "elm")


def _omniq_url(stores: Stores) -> str:
    return f"omniq+{stores.redis_url}?queue={_LETTERS}"


@task(_LETTERS, timeout_s=60)
async def _send_letter(job: Job) -> dict[str, Any]:
    """Send no letter: take a moment, and say that it is a sample."""
    play = job.payload.get("sample", {})
    await asyncio.sleep(min(play.get("seconds", 0.2), 5))
    if job.attempt <= play.get("fail", 0):
        raise SampleFailure("this letter was asked to fail")
    return {"sample": True, "tenant": job.payload.get("tenant", "")}


async def _feed_omniq(context: SampleContext) -> None:
    chance, client = random.Random(), Client(context.stores.redis_url)

    async def submit(number: int) -> None:
        tenant = chance.choice(_TENANTS)
        play = {"seconds": round(chance.uniform(0.1, 1.5), 2), "fail": failures(chance)}
        letter = {"tenant": tenant, "to": f"reader-{number}@{tenant}.test", "sample": play}
        retry: dict[str, Any] = {"backoff_ms": 500, "backoff": "exponential"}
        await client.publish(_LETTERS, letter, gid=tenant, group_limit=2, **retry)

    try:
        url = _omniq_url(context.stores)
        await _keep_submitting(context, url, submit, waiting=["wait"], per_s=2.0)
    finally:
        await client.close()


# plane: the gateway is the plane, and the worker works over HTTP. The producer writes next to it.
# Of the two streams `reports:now` goes first.

_STREAMS = ("reports:now", "reports:later")


def _plane_url(stores: Stores) -> str:
    query = f"streams={','.join(_STREAMS)}&keep_ms={_KEEP_MS}&lease_ms=30000"
    return f"plane+{stores.database('plane.db')}?{query}"


def _plane_worker_url(stores: Stores) -> str:
    """The same plane through the gateway: all that a worker needs to reach."""
    query = f"streams={','.join(_STREAMS)}&key_file={quote(str(stores.worker_key))}"
    return f"plane+{stores.gateway_url}?{query}"


def _plane_invitation(stores: Stores) -> str:
    return f"work from bash  examples/plane_worker.sh {stores.gateway_url} {_STREAMS[1]} cat"


@task("report")
async def _write_report(job: Job) -> dict[str, Any]:
    """Write a report: some pages, a failure where the sample asks for one, artifacts."""
    play = job.payload
    began_s = asyncio.get_running_loop().time()
    for page in range(play["pages"]):
        await asyncio.sleep(play["delay_s"])
        await job.report(round(100 * (page + 1) / play["pages"]), f"page {page + 1}")
    if job.attempt <= play["fail"]:
        raise RuntimeError("the printer is out of paper")
    took_ms = round((asyncio.get_running_loop().time() - began_s) * 1000)
    return {
        "artifacts": [{"name": "report.txt", "pages": play["pages"]}],
        "timings": {"write_ms": took_ms},
    }


async def _feed_plane(context: SampleContext) -> None:
    chance = random.Random()

    def make(number: int) -> NewJob:
        payload = {
            "pages": chance.randint(2, 6),
            "delay_s": round(chance.uniform(0.05, 0.3), 3),
            "fail": failures(chance),
        }
        stream = _STREAMS[0] if number % 4 == 0 else _STREAMS[1]
        raw = msgspec.json.encode(payload)
        return NewJob(task="report", payload=raw, max_attempts=3, options={"stream": stream})

    await _feed_queue(context, _plane_url(context.stores), make, waiting=["QUEUED"], per_s=1.0)


# inbox: a tiny clip, transcoded, and webhooks that tell of it. Inbox and outbox are two queues of
# one database. The clip is drawn by ffmpeg once; it and what is made of it lie in the one folder
# that `file://` may name. One job in ten has a source that is no clip and fails for good.

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
    """The inbox, which POST /transcode fills as well."""
    return f"inbox+{stores.database('inbox.db')}?keep_ms={_KEEP_MS}"


def _outbox_url(stores: Stores) -> str:
    return f"{_inbox_url(stores)}&box=outbox"


def _inbox_invitation(stores: Stores) -> str:
    if not stores.receiver_url:
        return ""
    return f"see webhooks    {stores.receiver_url}/ shows those of the transcodes, verified"


async def _feed_inbox(context: SampleContext) -> None:
    folder, receiver_url = context.stores.files, context.stores.receiver_url
    try:
        await asyncio.to_thread(draw_clip, folder)
    except UsageError as error:
        context.say(f"no samples of transcoding: {error}")
        return

    def make(number: int) -> NewJob:
        _forget_old(folder / "out")
        return inbox_sample(number, folder, receiver_url)

    url = _inbox_url(context.stores)
    await _feed_queue(context, url, make, waiting=["queued"], per_s=1 / 20, pause_s_max=30.0)


def inbox_sample(number: int, folder: Path, receiver_url: str) -> NewJob:
    """A transcode of the clip; every tenth of something else."""
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
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DRAWN_WITHIN_S,
            check=False,
        )
        if done.returncode:
            words = done.stderr.decode(errors="replace").strip()[-200:] or "no words"
            raise UsageError(f"ffmpeg drew no clip ({done.returncode}): {words}")
        draft.replace(folder / "clip.mp4")
    except subprocess.TimeoutExpired:
        raise UsageError(f"ffmpeg drew no clip within {_DRAWN_WITHIN_S:g} s") from None
    finally:
        draft.unlink(missing_ok=True)


def _forget_old(outputs: Path) -> None:
    """Remove the oldest outputs. Job ids begin with their time, so the first by name are oldest."""
    if outputs.is_dir():
        for old in sorted(outputs.iterdir())[:-_OUTPUTS_KEPT]:
            shutil.rmtree(old, ignore_errors=True)


FLOWS = (
    SampleFlow("streams", _streams_url, _feed_streams),
    SampleFlow("bullmq", _bullmq_url, _feed_bullmq, (_make_video,), _bullmq_invitation),
    SampleFlow("omniq", _omniq_url, _feed_omniq, (_send_letter,)),
    SampleFlow(
        "plane", _plane_url, _feed_plane, (_write_report,), _plane_invitation, _plane_worker_url
    ),
    SampleFlow(
        "inbox",
        _inbox_url,
        _feed_inbox,
        invitation=_inbox_invitation,
        needs=_NEEDS,
    ),
    SampleFlow("inbox", _outbox_url, needs=_NEEDS),
)
"""The queue of the first one is what the other commands speak to."""


def usable_flows(say: Callable[[str], None]) -> list[SampleFlow]:
    """All whose modules are installed; `say` names what the others lack."""
    lacking = {flow.contract: flow.missing() for flow in FLOWS if flow.missing()}
    for contract, names in lacking.items():
        say(
            f"without {contract}: not installed are {', '.join(names)} "
            "(pip install 'tenure[transcode]')"
        )
    return [flow for flow in FLOWS if flow.contract not in lacking]
