"""Three ways to write a handler, and three ways to end. Run it:

tenure worker examples/greetings.py
tenure submit greet -d '{"name": "Ada"}' --wait
"""

import time

from tenure import Fatal, Job, Retry, exponential, task


@task("greet", timeout_s=10)
async def greet(job: Job) -> dict[str, str]:
    """In the worker's event loop: for work that waits."""
    if "name" not in job.payload:
        raise Fatal('greet needs a "name"')  # trying again would not help
    await job.report(50, "half way")
    return {"text": f"Hello, {job.payload['name']}!"}


@task("count")
def count(job: Job) -> int:
    """In a thread: for libraries that block. A report is a plain call here."""
    for number in range(job.payload["to"]):
        if job.cancelled:
            break
        time.sleep(0.01)
        job.report(number + 1, "counting")
    return int(job.payload["to"])


@task("flaky", retry=exponential(100, max_attempts=5))
async def flaky(job: Job) -> dict[str, int]:
    """Fails twice, then succeeds: by its policy, or after the time it names itself."""
    if job.attempt == 1:
        raise ConnectionError("the first attempt always fails")
    if job.attempt == 2:
        raise Retry(0.1, "so does the second")
    return {"attempt": job.attempt}
