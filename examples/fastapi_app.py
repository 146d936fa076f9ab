"""A FastAPI application that submits, awaits, and works on the jobs itself. Run it:

uvicorn fastapi_app:app
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from await_result import greet
from fastapi import FastAPI

from tenure import Client, Worker

client = Client("main")


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    worker = Worker([greet], queues=["main"])
    async with client, asyncio.TaskGroup() as group:
        group.create_task(worker.serve())
        yield
        worker.stop()


app = FastAPI(lifespan=lifespan)


@app.post("/greetings/{name}")
async def greeting(name: str) -> str:
    handle = await client.submit(greet, name=name)
    return await handle.result(timeout_s=30)
