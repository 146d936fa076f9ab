import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from arq import create_pool
from arq.connections import RedisSettings
from arq.worker import Worker
from fastapi import FastAPI


async def greet(ctx: dict[str, Any], name: str) -> str:
    return f"Hello, {name}"


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.pool = await create_pool(RedisSettings())
    worker = Worker([greet], redis_settings=RedisSettings(), handle_signals=False)
    running = asyncio.create_task(worker.async_run())
    yield
    running.cancel()
    await worker.close()
    await app.state.pool.aclose()


app = FastAPI(lifespan=lifespan)


@app.post("/greetings/{name}")
async def greeting(name: str) -> str:
    job = await app.state.pool.enqueue_job("greet", name)
    return await job.result(timeout=30)
