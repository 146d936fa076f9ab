import asyncio

from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

results = RedisAsyncResultBackend("redis://127.0.0.1:6379/0")
broker = RedisStreamBroker("redis://127.0.0.1:6379/0").with_result_backend(results)


@broker.task
async def greet(name: str) -> str:
    return f"Hello, {name}"


async def main() -> None:
    await broker.startup()
    task = await greet.kiq(name="Ada")
    print((await task.wait_result(timeout=30)).return_value)
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
