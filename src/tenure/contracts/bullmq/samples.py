"""Samples for `tenure up`: videos, added by Node's own package where there is Node.

Our producer begins at once. When npm has installed the pinned package, Node's producer takes over;
if that ends, ours goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any
from uuid import uuid4

from tenure.contracts.bullmq.producer import open_producer
from tenure.contracts.bullmq.schema import VIDEO_GENERATION, check
from tenure.core.errors import InvalidJob
from tenure.core.outcome import Fatal
from tenure.core.registry import parse_url
from tenure.samples import (
    NodeProgram,
    NodeUnusable,
    SampleContext,
    SampleFailure,
    SampleFlow,
    SampleJob,
    Stores,
    failures,
    keep_submitting,
)

_VIDEOS = "video-generation"
_NODE_SOURCES = Path(__file__).with_name("node")
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


def _invitation(stores: Stores) -> str:
    """What a Node user writes to add a job; the password is shown only on request."""
    line = f"from Node       new Queue('{_VIDEOS}', {{ connection: {{ url }} }})"
    return f"{line}\n{' ' * 18}url: tenure config show redis_url --reveal"


async def _make_video(job: SampleJob) -> dict[str, Any]:
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


async def _feed(context: SampleContext) -> None:
    feeding = asyncio.create_task(_add_videos(context))
    try:
        program = await _node_producer(context)
        if program is not None:
            await _cancel(feeding)
            context.say(f"Node's own {program.package} adds the jobs of {_VIDEOS!r} now")
            environment = {"REDIS_URL": context.stores.redis_url}  # it may hold a password
            why = await program.run(_VIDEOS, environment=environment, say=context.say)
            context.say(f"Node's producer {why}: ours goes on")
            feeding = asyncio.create_task(_add_videos(context))
        await feeding
    finally:
        await _cancel(feeding)


async def _node_producer(context: SampleContext) -> NodeProgram | None:
    """Node's producer, ready to run; None, with a message, if it cannot be used."""
    ours = f"the jobs of {_VIDEOS!r} come from our own producer"
    redis_url = context.stores.redis_url
    if context.prepare_node is None:
        context.say(f"Node is not asked for (--no-node): {ours}")
        return None
    if not redis_url.startswith(("redis://", "rediss://")):
        context.say(f"Node does not know {parse_url(redis_url).safe}: {ours}")
        return None
    try:
        return await context.prepare_node(
            _NODE_SOURCES,
            context.folder,
            "bullmq",
            say=lambda doing: context.say(f"{doing}; until then {ours}"),
        )
    except NodeUnusable as error:
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


async def _cancel(running: asyncio.Task[None]) -> None:
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


FLOWS = (
    SampleFlow(
        contract="bullmq",
        rank=2,
        queue_url=_queue_url,
        feed=_feed,
        handlers={_VIDEOS: _make_video},
        invitation=_invitation,
    ),
)
