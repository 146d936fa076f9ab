"""Sample jobs of the `bullmq` contract, added by Node's own package where there is Node.

Ours begins at once. Meanwhile npm brings the pinned package into the data folder; then Node's
producer takes over, and should it end, ours goes on. Both add what the contract's text shows:
videos to be made, one after another.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from tenure.cli.samples.flow import Place, SampleFlow, Stores
from tenure.cli.samples.node import NodeProgram, NodeUnusable, prepare
from tenure.cli.samples.pace import failures, keep_submitting
from tenure.cli.views import safe_url
from tenure.contracts.bullmq import open_producer
from tenure.contracts.bullmq.schema import VIDEO_GENERATION, check
from tenure.core.errors import InvalidJob
from tenure.core.outcome import Fatal
from tenure.core.registry import open_ledger
from tenure.worker.job import Job
from tenure.worker.task import task

QUEUE = "video-generation"
_PER_S = 1.0
_SOURCES = Path(__file__).with_name("bullmq_node")
_PLAY = {"type": "object", "properties": {"fail": {"type": "integer", "minimum": 0}}}
SCHEMA: Mapping[str, Any] = {
    **VIDEO_GENERATION,
    "properties": {**VIDEO_GENERATION["properties"], "sample": _PLAY},
}
_OPTIONS: Mapping[str, Any] = {
    "attempts": 3,
    "backoff": {"type": "exponential", "delay": 500},
    "removeOnComplete": {"count": 1000},
    "removeOnFail": {"count": 1000},
}


def queue_url(stores: Stores) -> str:
    """A BullMQ queue under BullMQ's usual prefix, so that Node finds it by its name."""
    return f"bullmq+{stores.redis_url}?queue={QUEUE}"


def invitation(stores: Stores) -> str:
    """What a Node user writes to add a job here; the password is shown only to who asks for it."""
    line = f"from Node       new Queue('{QUEUE}', {{ connection: {{ url }} }})"
    return f"{line}\n{' ' * 18}url: tenure config show redis_url --reveal"


def _shown(redis_url: str) -> str:
    """Without its password."""
    return safe_url(f"bullmq+{redis_url}").removeprefix("bullmq+")


@task(QUEUE, timeout_s=60)
async def make_video(job: Job) -> dict[str, Any]:
    """Make no video: report the scenes one by one, and say that it is a sample."""
    try:
        check(job.payload, SCHEMA)
    except InvalidJob as error:
        raise Fatal(str(error)) from None
    scenes, play = job.payload["script"]["scenes"], job.payload.get("sample", {})
    for number, scene in enumerate(scenes):
        await asyncio.sleep(min(scene["duration"], 10) / 10)
        if job.attempt <= play.get("fail", 0):
            raise SampleFailure(f"scene {number + 1} was asked to fail")
        await job.report(round(100 * (number + 1) / len(scenes)), f"scene {number + 1}")
    return {"sample": True, "videoId": job.payload["videoId"], "scenes": len(scenes)}


class SampleFailure(Exception):
    """The failure that a sample job was asked for."""

    code = "sample_failure"


async def feed(place: Place) -> None:
    """Ours at once; Node's when it is ready; ours again should Node's end."""
    feeding = asyncio.create_task(_feed_from_python(place))
    try:
        program = await _prepared(place)
        if program is not None:
            await _end(feeding)
            place.say(f"Node's own {program.package} adds the jobs of {QUEUE!r} now")
            environment = {"REDIS_URL": place.stores.redis_url}  # it may hold a password
            why = await program.run(QUEUE, environment=environment, say=place.say)
            place.say(f"Node's producer {why}: ours goes on")
            feeding = asyncio.create_task(_feed_from_python(place))
        await feeding
    finally:
        await _end(feeding)


async def _prepared(place: Place) -> NodeProgram | None:
    """Node's producer, ready to run, or None and a word why not."""
    ours = f"the jobs of {QUEUE!r} come from our own producer"
    if not place.node:
        place.say(f"Node is not asked for (--no-node): {ours}")
        return None
    if not place.stores.redis_url.startswith(("redis://", "rediss://")):
        place.say(f"Node does not know {_shown(place.stores.redis_url)}: {ours}")
        return None
    try:
        return await prepare(
            _SOURCES,
            place.folder,
            "bullmq",
            say=lambda doing: place.say(f"{doing}; until then {ours}"),
        )
    except NodeUnusable as error:
        place.say(f"{error}: {ours}")
        return None


async def _feed_from_python(place: Place) -> None:
    url, chance = queue_url(place.stores), random.Random()
    producer, ledger = open_producer(url, schema=SCHEMA), open_ledger(url)

    async def submit(number: int) -> None:
        urgent = {"priority": 1} if number % 5 == 4 else {}
        await producer.add(QUEUE, sample_video(chance), **_OPTIONS, **urgent)

    async def waiting() -> int:
        states = (await ledger.counts()).states
        return states["waiting"] + states["prioritized"]

    try:
        await keep_submitting(submit, waiting, per_s=_PER_S, chance=chance, say=place.say)
    finally:
        await producer.close()
        await ledger.close()


def sample_video(chance: random.Random) -> dict[str, Any]:
    """A payload as the contract's example has it, and how its handler shall behave."""
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


async def _end(running: asyncio.Task[None]) -> None:
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


FLOW = SampleFlow("bullmq", queue_url, feed, (make_video,), invitation)
