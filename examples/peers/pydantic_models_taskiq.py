import asyncio

from pydantic import BaseModel, PositiveInt
from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

results = RedisAsyncResultBackend("redis://127.0.0.1:6379/0")
broker = RedisStreamBroker("redis://127.0.0.1:6379/0").with_result_backend(results)


class Order(BaseModel):
    item: str
    count: PositiveInt


class Receipt(BaseModel):
    total: float


@broker.task
async def sell(order: Order) -> Receipt:
    return Receipt(total=4.5 * order.count)


async def main() -> None:
    await broker.startup()
    task = await sell.kiq(order=Order(item="tea", count=2))
    result = await task.wait_result(timeout=30)
    result.raise_for_error()
    await broker.shutdown()
    print(result.return_value.total)


if __name__ == "__main__":
    asyncio.run(main())
