"""A model that is loaded once, before the worker takes its first job. Run it:

python model_once.py
tenure submit price -d '{"item": "tea"}' --wait
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tenure import Job, Worker, task


@asynccontextmanager
async def model() -> AsyncIterator[dict[str, float]]:
    print("loading the model", flush=True)
    yield {"tea": 4.5, "cake": 6.0}


@task("price")
async def price(job: Job, item: str) -> float:
    prices: dict[str, float] = job.state
    return prices[item]


if __name__ == "__main__":
    Worker([price], queues=["main"], lifespan=model).run()
