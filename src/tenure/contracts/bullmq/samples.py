"""Samples for `tenure up`: videos.

Our producer begins at once. If there is Node, npm installs the pinned package and Node's producer
takes over; if that ends, ours continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
import secrets
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec

from tenure.contracts.bullmq.producer import open_producer
from tenure.contracts.bullmq.schema import VIDEO_GENERATION, check
from tenure.core.errors import InvalidJob, NotFound
from tenure.core.outcome import Fatal
from tenure.core.process import bound_to_parent, describe_exit, read_lines, running
from tenure.core.registry import parse_url
from tenure.samples import (
    SampleContext,
    SampleFailure,
    SampleFlow,
    SampleJob,
    Stores,
    failures,
    keep_submitting,
)
from tenure.store.embedded import locate_node

_VIDEOS = "video-generation"
_NODE_SOURCES = Path(__file__).with_name("node")
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


def _queue_url(stores: Stores) -> str:
    """Under BullMQ's usual prefix, so that Node finds the queue by its name."""
    return f"bullmq+{stores.redis_url}?queue={_VIDEOS}"


def _hint(stores: Stores) -> str:
    """The line with which a Node user adds a job; the password is shown only on request."""
    line = f"from Node       new Queue('{_VIDEOS}', {{ connection: {{ url }} }})"
    return f"{line}\n{' ' * 18}url: tenure config show redis_url --reveal"


async def _make_video(job: SampleJob) -> dict[str, Any]:
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


async def _produce(context: SampleContext) -> None:
    producing = asyncio.create_task(_add_videos(context))
    try:
        if found := await _node_producer(context):
            node, folder, package = found
            await _cancel(producing)
            context.say(f"Node's own {package} adds the jobs of {_VIDEOS!r} now")
            # It may contain a password.
            environment = {**context.environment, "REDIS_URL": context.stores.redis_url}
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
            raise NotFound(f"Node does not know {parse_url(redis_url).safe}")
        return await _install_node_program(
            context, lambda doing: context.say(f"{doing}; until then {ours}")
        )
    except NotFound as error:
        context.say(f"{error}: {ours}")
        return None


async def _add_videos(context: SampleContext) -> None:
    url, chance = _queue_url(context.stores), random.Random()
    producer = open_producer(url, schema=_VIDEO_SCHEMA)

    async def submit(number: int) -> None:
        urgent = {"priority": 1} if number % 5 == 4 else {}
        await producer.add(_VIDEOS, _sample_video(chance), **_VIDEO_OPTIONS, **urgent)

    try:
        states = ["waiting", "prioritized"]
        await keep_submitting(context, url, submit, waiting=states, per_s=1.0)
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
        "sample": {"fail": failures(chance)},
    }


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def _install_node_program(
    context: SampleContext, say: Callable[[str], None]
) -> tuple[Path, Path, str]:
    """Have npm install the program and its pinned packages in the data folder, once.

    The folder's name contains a hash of the lock file. npm works in a temporary folder that is
    renamed when it has succeeded, so packages are complete or absent.
    """
    lock, program, listed = (
        (_NODE_SOURCES / name).read_bytes()
        for name in ("package-lock.json", "main.mjs", "package.json")
    )
    version = msgspec.json.decode(listed)["dependencies"]["bullmq"]
    folder = context.folder
    target = folder / f"bullmq-{version}-{hashlib.sha256(lock + program).hexdigest()[:12]}"
    node = await asyncio.to_thread(locate_node)
    npm = _npm(node)
    if not target.exists():
        say(f"npm brings bullmq {version} into {target}")
        draft = folder / f".{target.name}.{secrets.token_hex(4)}"
        try:
            await asyncio.to_thread(shutil.copytree, _NODE_SOURCES, draft)
            await _run_npm(npm, draft, context.environment)
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


async def _run_npm(npm: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
    lines: list[str] = []
    async with _child([*npm, *_NPM_INSTALL], folder, environment) as process:
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
    argv = bound_to_parent(command, dies_by=signal.SIGKILL)
    return running(argv, grace_s=_NODE_ENDS_WITHIN_S, cwd=folder, env=environment)


FLOWS = (
    SampleFlow(
        contract="bullmq",
        rank=2,
        queue_url=_queue_url,
        produce=_produce,
        handlers={_VIDEOS: _make_video},
        hint=_hint,
    ),
)
