"""Pydantic models as parameters and as the result, checked on both sides. Run it:

tenure worker pydantic_models.py
python pydantic_models.py
"""

import asyncio

from pydantic import BaseModel, PositiveInt

from tenure import Client, task


class Order(BaseModel):
    item: str
    count: PositiveInt


class Receipt(BaseModel):
    total: float


@task("sell")
async def sell(order: Order) -> Receipt:
    return Receipt(total=4.5 * order.count)


async def main() -> None:
    async with Client.from_env() as client:
        handle = await client.submit(sell, order=Order(item="tea", count=2))
        receipt = await handle.result(timeout_s=30)
    print(receipt.total)


if __name__ == "__main__":
    asyncio.run(main())
