"""Delays of your own between the attempts: 0.1 s, then 0.4 s, then 0.9 s. Run it:

tenure worker backoff.py
python backoff.py
"""

import asyncio

from tenure import Client, Job, Retry, fixed, task


@task("fetch", retry=fixed(0, max_attempts=4))
async def fetch(job: Job, url: str) -> int:
    if job.attempt < 3:
        raise Retry(0.1 * job.attempt**2, f"{url} does not answer")
    return job.attempt


async def main() -> None:
    async with Client.from_env() as client:
        handle = await client.submit(fetch, url="http://example.org")
        print("attempt", await handle.result(timeout_s=30))


if __name__ == "__main__":
    asyncio.run(main())
