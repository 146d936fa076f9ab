"""One report at a time: while it waits or runs, it is the answer to every further submit. Run it:

tenure worker unique.py --queue mail
python unique.py
"""

import asyncio

from tenure import Client, task


@task("report")
async def report(month: str) -> str:
    await asyncio.sleep(1)
    return f"the report of {month}"


async def main() -> None:
    async with Client("mail") as client:
        first = await client.submit(report.call(month="May"), unique="May")
        again = await client.submit(report.call(month="May"), unique="May")
        print(again.id == first.id, await again.result(timeout_s=30))


if __name__ == "__main__":
    asyncio.run(main())
