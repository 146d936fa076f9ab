"""Submit a job and await its result. Run it:

tenure worker await_result.py
python await_result.py
"""

import asyncio

from tenure import Client, task


@task("greet")
async def greet(name: str) -> str:
    return f"Hello, {name}"


async def main() -> None:
    async with Client.from_env() as client:
        handle = await client.submit(greet, name="Ada")
        print(await handle.result(timeout_s=30))


if __name__ == "__main__":
    asyncio.run(main())
