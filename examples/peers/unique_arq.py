import asyncio
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.jobs import Job


async def report(ctx: dict[str, Any], month: str) -> str:
    await asyncio.sleep(1)
    return f"the report of {month}"


class WorkerSettings:
    functions = (report,)  # the id stays taken for as long as the result is kept, one hour


async def main() -> None:
    pool = await create_pool(RedisSettings())
    first = await pool.enqueue_job("report", "May", _job_id="May")
    again = await pool.enqueue_job("report", "May", _job_id="May") or Job("May", pool)
    print(again.job_id == first.job_id, await again.result(timeout=30))
    await pool.aclose()


if __name__ == "__main__":
    asyncio.run(main())
