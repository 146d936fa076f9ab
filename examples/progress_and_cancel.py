"""Follow a job's progress, then cancel it while it runs. Run it:

tenure worker progress_and_cancel.py
python progress_and_cancel.py
"""

import asyncio

from tenure import Client, Job, task


@task("count")
async def count(job: Job, upto: int) -> int:
    for number in range(upto):
        await job.report(100 * number // upto, data={"at": number})
        await asyncio.sleep(0.1)
    return upto


async def main() -> None:
    async with Client.from_env() as client:
        handle = await client.submit(count, upto=1_000)
        async for event in handle.events():
            if event.type == "progress" and event.data["at"] == 3:
                print("at", event.data["at"], await handle.cancel())
        print((await handle.status()).state)


if __name__ == "__main__":
    asyncio.run(main())
