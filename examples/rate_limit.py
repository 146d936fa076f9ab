"""At most two jobs a second, whatever the number of workers: the queue `limited` says so. Run it:

tenure worker rate_limit.py --queue limited
python rate_limit.py
"""

import asyncio
import time

from tenure import Client, task


@task("call")
async def call(number: int) -> float:
    return time.time()


async def main() -> None:
    async with Client("limited") as client:
        handles = await client.submit_many([call.call(number=n) for n in range(5)])
        times = sorted([await handle.result(timeout_s=30) for handle in handles])
    print(f"five jobs took {times[-1] - times[0]:.0f} s")


if __name__ == "__main__":
    asyncio.run(main())
