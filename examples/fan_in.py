"""Jobs side by side and one when all are done; then one job after another. Run it:

tenure worker fan_in.py
python fan_in.py
"""

import asyncio

from tenure import Client, Job, task


@task("count-words")
async def count_words(text: str) -> int:
    return len(text.split())


@task("add-up")
async def add_up(job: Job) -> int:
    return sum(await job.children)


@task("double")
async def double(job: Job) -> int:
    return int(2 * sum(await job.children))


async def main() -> None:
    async with Client.from_env() as client:
        counts = [count_words.call(text=text) for text in ("to be", "or not to be")]
        total = await client.gather(counts, then=add_up)
        print(await total.result(timeout_s=30))
        chain = await client.chain(count_words.call(text="to be"), double)
        print(await chain.result(timeout_s=30))


if __name__ == "__main__":
    asyncio.run(main())
