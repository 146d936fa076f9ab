"""Ready-made ways to submit a job: what the overview and the page of a job offer to copy."""

from __future__ import annotations

import shlex
from typing import Any
from urllib.parse import quote

import msgspec

from tenure.core.job import JobRecord
from tenure.dashboard.house import Street
from tenure.dashboard.reading import decoded

_STREAMS = """\
curl -s {base}/v1/jobs -H 'content-type: application/json' \\
  -d '{{"task": "chat", "payload": {{"prompt": "Say hello."}}}}'"""
_BULLMQ = """\
import {{ Queue }} from 'bullmq'
const queue = new Queue('{short}', {{ connection: {{ url: '{store}' }} }})
await queue.add({task}, {payload})
await queue.close()"""
_OMNIQ = """\
import asyncio, json
from tenure.contracts.omniq import Client

async def main():
    async with Client('{store}') as client:
        print(await client.publish('{short}', json.loads({quoted})))

asyncio.run(main())"""
_PLANE = """\
curl -s {base}/v1/plane/jobs -H 'content-type: application/json' \\
  -d {body}"""
# What a contract's own clients write; a contract that is not here has the two ways all have.
_NATIVE = {
    "streams": ("curl, the contract's own endpoint", _STREAMS),
    "bullmq": ("Node, with the bullmq package", _BULLMQ),
    "omniq": ("Python, with the contract's own client", _OMNIQ),
    "plane": ("curl, the contract's own endpoint", _PLANE),
}


class Box(msgspec.Struct, frozen=True):
    """How to submit to one queue."""

    queue: str
    contract: str
    task: str
    payload: str
    ways: tuple[tuple[str, str], ...]


def boxes(street: Street, base: str, recent: dict[str, JobRecord]) -> list[Box]:
    """One box a queue, with the newest job as the example."""
    made = []
    for house in street:
        if getattr(house.ledger, "is_outbox", False):
            continue  # its jobs are made by the steps of others
        job = recent.get(house.name)
        task = job.task if job else "chat"
        payload = decoded(job.payload) if job else {"prompt": "Say hello."}
        ways = [
            ("curl", curl_of(base, house.name, task, payload)),
            ("command line", command_of(house.address, task, payload)),
        ]
        if house.contract in _NATIVE:
            name, text = _NATIVE[house.contract]
            filled = text.format(
                base=base,
                short=house.name.partition(":")[2] or "jobs",
                store=house.address.partition("+")[2].partition("?")[0],
                task=_json(task),
                payload=_json(payload),
                quoted=repr(_json(payload)),
                body=shlex.quote(_json({"task": task, "payload": payload})),
            )
            ways.append((name, filled))
        made.append(Box(house.name, house.contract, task, _json(payload), tuple(ways)))
    return made


def curl_of(base: str, queue: str, task: str, payload: Any) -> str:
    """The job as a curl command."""
    body = shlex.quote(_json({"task": task, "payload": payload}))
    url = f"{base}/api/queues/{quote(queue, safe=':')}/jobs"
    return f"curl -s {url} \\\n  -H 'content-type: application/json' -d {body}"


def command_of(address: str, task: str, payload: Any) -> str:
    """The job as a command of ours, run where the queue's store can be reached."""
    data, url = shlex.quote(_json(payload)), shlex.quote(address)
    return f"tenure submit {shlex.quote(task)} -q {url} \\\n  -d {data}"


def _json(value: Any) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()
