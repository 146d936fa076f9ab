"""Runs in the environment of the `bullmq` package for Python, which knows nothing of Tenure.

python driver.py add PORT QUEUE    adds what JSON lines on stdin ask for, prints an id each
python driver.py work PORT QUEUE   works, doing what each job's data say, until it is ended
python driver.py see PORT QUEUE    prints the state of each job whose id is on stdin
"""

import asyncio
import json
import signal
import sys

from bullmq import Job, Queue, Worker

LOCK_MS = 1_000


async def obey(job, token):
    data = job.data or {}
    await asyncio.sleep(data.get("ms", 0) / 1000)
    if data.get("do") == "flaky" and job.attemptsMade < data["times"]:
        raise RuntimeError(data.get("why", "failed on purpose"))
    return data.get("result", {"by": "the package"})


async def add(queue):
    for line in sys.stdin:
        wanted = json.loads(line)
        job = await queue.add(wanted["name"], wanted["data"], wanted["opts"])
        print(job.id, flush=True)


async def see(queue):
    for line in sys.stdin:
        job = await Job.fromId(queue, line.strip())
        told = {
            "state": await queue.getJobState(job.id),
            "returnvalue": job.returnvalue,
            "failedReason": job.failedReason,
            "attemptsMade": job.attemptsMade,
        }
        print(json.dumps(told), flush=True)


async def work(name, options):
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    settings = {
        "concurrency": 20,
        "lockDuration": LOCK_MS,
        "stalledInterval": 500,
        "maxStalledCount": 50,
    }
    worker = Worker(name, obey, {**options, **settings})
    print("ready", flush=True)
    await stop.wait()
    await worker.close()


async def main(verb, port, name):
    options = {"connection": {"host": "127.0.0.1", "port": int(port)}}
    if verb == "work":
        await work(name, options)
        return
    queue = Queue(name, options)
    await {"add": add, "see": see}[verb](queue)
    await queue.close()


asyncio.run(main(*sys.argv[1:]))
